"""Failures of rollouts: each is a typed result, in time, and leaves no process or mount."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from support.attacks import IMAGE, token
from support.containers import list_leftovers, podman
from support.deployment import CALL
from support.engine import reply_with
from support.gateway import open_session
from support.sandbox import running
from tugline import schema
from tugline.errors import CaptureError, EngineError, UsageError
from tugline.gateway.app import Opened
from tugline.gateway.policy import CallSettings
from tugline.recording.file import read
from tugline.rollout.failures import classify
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.rollout.stages import StageSlots
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.schema import read_values
from tugline.task_files import parse_task
from tugline.testing import Reply
from tugline.types import (
    HANDLING,
    STAGES,
    Cause,
    PluginSpec,
    Reason,
    Session,
    Status,
    Task,
    Trajectory,
    decode,
    encode,
)

__all__ = ["podman"]

FILES = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "test_bill.py": "from bill import total\n\ndef test_total():\n    assert total(2, 3) == 5\n",
}
IN_PARTS = CALL.replace("{'messages'", "{'stream': True, 'messages'")
AGENT = f"""
mend() {{ sed -i s/-/+/ bill.py; }}
ask() {{ python3 -I -c "{CALL}"; }}
ask_in_parts() {{ python3 -I -c "{IN_PARTS}"; }}
"""
LIMITS = {"init_s": 20.0, "agent_s": 20.0, "eval_s": 10.0}
GATEWAY_GONE = "127.0.0.1:9"
FAULT = Reply((), status=500)


class Case(msgspec.Struct, frozen=True):
    """A case of failures.yaml, where its fields are described."""

    cause: Cause | None = None
    message: str = ""
    script: str = "mend; ask"
    task: dict[str, Any] = msgspec.field(default_factory=dict)
    reward: float | None = None
    total_s: float | None = None
    before: str = "nothing"
    at_build: str = "nothing"
    check: str = "nothing"
    gateway: str = "itself"
    engine: str = "answer"
    podman: bool = False


TABLE = read_values(Path(__file__).with_name("failures.yaml"))
CASES = schema.decode(TABLE, dict[Status, dict[str, Case]])


def find_function(name: str) -> Any:
    """The function of a name in a case."""
    return globals()[f"_{name}"]


def _nothing(*_args: Any) -> None:
    pass


def _failing_build(folder: Path) -> None:
    (folder / "image").mkdir()
    (folder / "image" / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo exit-7; exit 7\n")


def _small_disk(folder: Path) -> None:
    (folder / "session").mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder / "session"))
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")


def _read_only(folder: Path) -> None:
    _small_disk(folder)
    subprocess.run(["mount", "-o", "remount,ro", str(folder / "session")], check=True)


def _used(folder: Path) -> None:
    (folder / "session" / "agent" / "work").mkdir(parents=True)
    (folder / "session" / "agent" / "work" / "old").touch()


def _base(folder: Path) -> None:
    (folder / "base").mkdir()
    for name, text in FILES.items():
        (folder / "base" / name).write_text(text)
        (folder / "base" / name).chmod(0o444)
    (folder / "base").chmod(0o555)


def _remove_recording(folder: Path) -> None:
    next((folder / "gateway").glob("s9.*.rec")).unlink()


def _damage_last_call(folder: Path) -> None:
    (path,) = (folder / "gateway").glob("s9.*.rec")
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 255]) + data[-8:])


def _overwrite_recording(folder: Path) -> None:
    (path,) = (folder / "gateway").glob("s9.*.rec")
    path.write_bytes(b"nothing")


def _counted(_folder: Path, trajectory: Trajectory) -> None:
    """The tokens that can be read are in the ledger, as dropped ones."""
    ledger = trajectory.ledger
    assert ledger.sampled > 0
    assert ledger.dropped == {Reason.SESSION_FAILED: ledger.sampled}


def _odd_bytes(folder: Path, trajectory: Trajectory) -> None:
    (log,) = (folder / "session" / "agent").rglob("agent.log")
    assert b"\xff\xfe" in log.read_bytes()
    assert any("name is not UTF-8" in note for note in trajectory.report["notes"])


def _partial(folder: Path, trajectory: Trajectory) -> None:
    (trace,) = trajectory.traces
    assert trajectory.ledger.trained == trace.mask.sum() > 0
    (recording,) = (folder / "gateway").glob("s9.*.rec")
    assert read(recording).result.ledger == trajectory.ledger


_answer = reply_with("Done.")


def _refuse(_prompt: Any, _request: str) -> Reply:
    return Reply((), status=400)


def _fail(_prompt: Any, _request: str) -> Reply:
    return FAULT


def _cut_first(prompt: Any, request: str) -> Reply:
    return replace(_answer(prompt, request), cut_after=1) if request.endswith("-0") else FAULT


def _itself(gateway: Any) -> Any:
    return gateway


class _Gone:
    """A gateway whose sessions get an address where nothing listens."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    @contextlib.asynccontextmanager
    async def open(self, *args: Any, **options: Any) -> AsyncIterator[Opened]:
        """Open a session, with a wrong address."""
        async with self._gateway.open(*args, **options) as opened:
            yield Opened(f"http://{GATEWAY_GONE}/s/x", opened.key)


def a_task(case: Case, folder: Path, mark: str) -> Task:
    """The task of a case; `mark` is in its agent's command line."""
    command = ["sh", "-c", f": {mark}; {AGENT} {case.script}"]
    task = {
        "id": "t",
        "instruction": "Mend it.",
        "harness": {"name": "shell", "options": {"command": command}},
        "evaluator": "tests",
        "runtime": "bubblewrap",
        "files": FILES,
        **case.task,
    }
    task["limits"] = LIMITS | task.get("limits", {})
    text = json.dumps(task).replace("FOLDER", str(folder))
    return parse_task(json.loads(text), "the case", folder)


def mounts(folder: Path) -> list[str]:
    """File systems mounted below `folder`."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(str(folder))]


@pytest.fixture
def task(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Task]:
    """The task of a case, with its folder prepared; no process or mount is left of it."""
    mark = token()
    made = a_task(case, tmp_path, mark)
    if case.podman:
        engine = {"engine": request.getfixturevalue("podman"), "pull": "never"}
        made = replace(made, runtime=PluginSpec("container", engine))
    elif made.runtime.name == "bubblewrap" and (reason := Bubblewrap().check_available()):
        pytest.skip(reason)
    find_function(case.before)(tmp_path)
    mounted = mounts(tmp_path)
    yield made
    assert not running(mark)
    assert mounts(tmp_path) == mounted
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)
    if case.podman:
        assert not list_leftovers(made.runtime.options["engine"], tmp_path)


@pytest.mark.parametrize(
    ("status", "case"),
    [
        pytest.param(status, case, id=name, marks=[pytest.mark.podman] * case.podman)
        for status, cases in CASES.items()
        for name, case in cases.items()
    ],
)
async def test_a_failure_is_a_typed_result(
    status: Status, case: Case, task: Task, tmp_path: Path
) -> None:
    """Each failure has its status, cause, boundary and message, in time.

    The checks are rules that hold for each row of failures.yaml.
    """
    stages = [Status.QUEUED]

    def on_stage(status: Status) -> None:
        stages.append(status)
        if status is Status.BUILD:
            find_function(case.at_build)(tmp_path)

    play, settings = find_function(case.engine), CallSettings(backoff_s=0.01)
    async with (
        open_session(tmp_path / "gateway", play, tuning=settings) as model,
        asyncio.timeout(45),
    ):
        trajectory = await roll_out(
            task,
            Session(id="s9", task="t", sample=0),
            gateway=find_function(case.gateway)(model.gateway),
            directory=tmp_path / "session",
            parts=Parts(),
            on_stage=on_stage,
            slots=StageSlots(case.total_s, eval_grace_s=0.5),
        )
    failure = trajectory.failure
    assert (failure.cause if failure else None) is case.cause, failure
    assert trajectory.status is status
    assert stages == [Status.QUEUED, *STAGES][: len(stages)], "each stage once, in order"
    assert status is not Status.COMPLETED or stages[-1] is Status.EVAL
    if failure is not None and case.cause is not None:
        assert failure.boundary is HANDLING[case.cause].boundary
        assert case.message.replace("FOLDER", str(tmp_path)) in failure.message
        assert len(failure.message) < 2000
        assert (trajectory.reward is not None) is HANDLING[case.cause].evaluated
    assert (trajectory.reward.value if trajectory.reward else None) == case.reward
    assert trajectory.ledger.balanced
    assert decode(encode(trajectory), Trajectory).status is status
    find_function(case.check)(tmp_path, trajectory)
    assert not running(str(tmp_path / "session"))


def test_every_cause_has_a_case() -> None:
    """Every cause in `HANDLING` occurs, except that of a node's server."""
    causes = {case.cause for cases in CASES.values() for case in cases.values()}
    assert causes - {None} == set(HANDLING) - {Cause.RESULT}


@pytest.mark.parametrize(
    ("stage", "error", "cause"),
    [
        (Status.INIT, OSError("x"), Cause.NODE),
        (Status.RUN, OSError(errno.EDQUOT, "x"), Cause.DISK),
        (Status.BUILD, EngineError("no ids"), Cause.ENGINE),
        (Status.INIT, CaptureError("no file"), Cause.RECORDING),
        (Status.BUILD, CaptureError("no ids"), Cause.ENGINE),
        (Status.BUILD, TimeoutError(errno.ETIMEDOUT, "a file system's"), Cause.NODE),
        (Status.EVAL, UsageError("x"), Cause.EVALUATOR),
    ],
)
def test_failures_are_classified_by_error_and_stage(
    stage: Status, error: Exception, cause: Cause
) -> None:
    """The type of the error decides first, then the stage."""
    failure = classify(stage, error)
    assert (failure.cause, failure.boundary) == (cause, HANDLING[cause].boundary)
    assert str(error) in failure.message
