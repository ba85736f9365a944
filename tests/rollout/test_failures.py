"""Everything that goes wrong ends as a typed result, in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from attacked import IMAGE, running, token
from containers import left, podman
from observed import CALL
from rig import Play, Reply, rig, says
from transitions import TRANSITIONS
from tugline.errors import CaptureError, EngineError, UsageError
from tugline.gateway.app import Opened
from tugline.gateway.policy import CallSettings
from tugline.recording.file import read
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.rollout.stages import StageSlots, classify
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.types import (
    HANDLING,
    Cause,
    Limits,
    PluginSpec,
    Session,
    Status,
    Task,
    Trajectory,
    Workspace,
    decode,
    encode,
)

__all__ = ["podman"]

ASK = f'python3 -I -c "{CALL}"'
"""A script's line that calls the model once."""
FILES = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "test_bill.py": "from bill import total\n\ndef test_total():\n    assert total(2, 3) == 5\n",
}
MEND = "sed -i s/-/+/ bill.py"


SANDBOXED = PluginSpec("bubblewrap")
LIMITS = Limits(init_s=20.0, agent_s=20.0, eval_s=10.0)
PLAY = says("Done.")
QUICK = CallSettings(backoff_s=0.01)


@dataclass(frozen=True)
class Case:
    """What is wrong, and what must come of it."""

    name: str
    cause: Cause | None
    message: str = ""
    """Part of the failure's message, with ``{folder}`` for the test's folder."""
    workspace: dict[str, str] = field(default_factory=dict)
    """The task's, with the same."""
    script: str = f"{MEND}; {ASK}"
    runtime: PluginSpec = SANDBOXED
    change: dict[str, Any] = field(default_factory=dict)
    """Fields of the task."""
    limits: Limits = LIMITS
    play: Play = PLAY
    reward: float | None = None
    total_s: float | None = None
    before: Callable[[Path], None] | None = None
    """Done to the test's folder first."""
    at_build: Callable[[Path], None] | None = None
    """Done to the test's folder when the agent has ended."""
    after: Callable[[Path], None] | None = None
    check: Callable[[Path, Trajectory], None] | None = None
    gateway: Callable[[Any], Any] = lambda gateway: gateway
    marks: tuple[Any, ...] = ()


def _failing_build(folder: Path) -> None:
    (folder / "image").mkdir()
    (folder / "image" / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo exit-7; exit 7\n")


def _small_disk(folder: Path) -> None:
    (folder / "session").mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder / "session"))
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")


def _read_only(folder: Path) -> None:
    _small_disk(folder)
    subprocess.run(["mount", "-o", "remount,ro", str(folder / "session")], check=True)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder / "session")], check=True)


def _used(folder: Path) -> None:
    (folder / "session" / "agent" / "work").mkdir(parents=True)
    (folder / "session" / "agent" / "work" / "old").touch()


def _base(folder: Path) -> None:
    (folder / "base").mkdir()
    for name, text in FILES.items():
        (folder / "base" / name).write_text(text)
        (folder / "base" / name).chmod(0o444)
    (folder / "base").chmod(0o555)


def _odd_bytes(folder: Path, trajectory: Trajectory) -> None:
    (log,) = (folder / "session" / "agent").rglob("agent.log")
    assert b"\xff\xfe" in log.read_bytes()
    assert any("name with control or undecodable" in one for one in trajectory.report["notes"])


def _cut_first(prompt: Any, request: str) -> Reply:
    first = replace(PLAY(prompt, request), cut_after=1)
    return first if request.endswith("-0") else Reply((), status=500)


def _partial(folder: Path, trajectory: Trajectory) -> None:
    (trace,) = trajectory.traces
    assert trajectory.ledger.trained == trace.mask.sum() > 0
    (recording,) = (folder / "gateway").glob("s9.*.rec")
    assert read(recording).result.ledger == trajectory.ledger


class Gone:
    """A gateway at an address where nothing is."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    @contextlib.asynccontextmanager
    async def open(self, *given: Any, **terms: Any) -> AsyncIterator[Opened]:
        """As if its node had a wrong address."""
        async with self._gateway.open(*given, **terms) as opened:
            yield Opened(f"http://{GATEWAY_GONE}/s/x", opened.key)


GATEWAY_GONE = "127.0.0.1:9"
PODMAN = (pytest.mark.podman,)
CALL_OR_NOT = f"{MEND}; {ASK} || true"
STREAM = ASK.replace("{'messages'", "{'stream': True, 'messages'")
EAT = f"{ASK}; exec python3 -I -c 'b = []\nwhile True: b.append(b\"x\" * (1 << 22))'"
FILL = f"{ASK}; for n in $(seq 300); do head -c 10M /dev/zero > big$n; sleep 0.1; done"
ODD = f"{MEND}; {ASK}; printf '\\377\\376'; touch \"$(printf 'a\\377')\"; printf '\\303'"
UNSEALED = f"! {MEND} && chmod u+w . && {MEND} && {ASK}"
ENDLESS = f"{MEND}; {ASK}; sleep 300"
GONE = "{folder}/nonesuch"
IMAGE_GONE = "localhost/tugline/nonesuch:1"
BIG = {f"big{n}": "x" * (1 << 20) for n in range(8)}
SOCKET = PluginSpec("container", {"engine": "unix:///nonesuch.sock", "image": "x"})
FAILED = [
    Case("bad task: a path that leaves", Cause.TASK, "../x", change={"files": {"../x": "x"}}),
    Case("bad task: an image without a container", Cause.TASK, "image", {"image": "localhost/a:1"}),
    Case("a repository that is not there", Cause.WORKSPACE, GONE, {"repo": GONE, "commit": "main"}),
    Case("a folder that is not there", Cause.WORKSPACE, GONE, {"folder": GONE}),
    Case("a session's folder that is used", Cause.SANDBOX, "not empty", before=_used),
    Case(
        "a session's folder that is read-only", Cause.SANDBOX, "Read-only file system",
        before=_read_only, after=_unmount,
    ),
    Case(
        "a disk that is full", Cause.DISK, "No space left", change={"files": BIG},
        before=_small_disk, after=_unmount,
    ),
    Case("an image that is missing", Cause.IMAGE, IMAGE_GONE, {"image": IMAGE_GONE}, marks=PODMAN),
    Case(
        "a Dockerfile that fails", Cause.IMAGE, "exit-7", {"build": "{folder}/image"},
        before=_failing_build, marks=PODMAN,
    ),
    Case(
        "a container engine that is not there", Cause.SANDBOX, "/nonesuch.sock",
        {"image": IMAGE}, runtime=SOCKET,
    ),
    Case("a program that is missing", Cause.CRASH, "nonesuch: not found", script="exec nonesuch"),
    Case("a program that breaks", Cause.CRASH, "SIGSEGV", script=f"{ASK}; kill -SEGV $$"),
    Case(
        "a program that never calls the model", Cause.CRASH, "code 3 and made no model call: oh",
        script="echo oh; exit 3",
    ),
    Case(
        "a program that hangs at its start", Cause.CRASH, "ran out of time and made no model call",
        script="sleep 9", limits=Limits(agent_s=0.5),
    ),
    Case(
        "a harness that cannot be installed", Cause.INSTALL, "no such version",
        change={"harness": PluginSpec("bad_parts:Uninstallable")},
    ),
    Case(
        "a harness whose needs a node does not have", Cause.INSTALL, "no Node here",
        change={"harness": PluginSpec("bad_parts:Needy")},
    ),
    Case(
        "a start that takes too long", Cause.INIT_TIMEOUT, "init was out of time",
        runtime=PluginSpec("bad_parts:Slow"), limits=Limits(init_s=0.3),
    ),
    Case(
        "a machine that is gone once the agent has ended", Cause.SANDBOX, "the machine is gone",
        script=ASK, runtime=PluginSpec("bad_parts:Dying"), check=_partial,
    ),
    Case(
        "a crash in a sandbox that cannot be cleared", Cause.CRASH, "code 3", script="exit 3",
        runtime=PluginSpec("bad_parts:Unclosed"),
    ),
    Case("a gateway that is not there", Cause.NETWORK, GATEWAY_GONE, gateway=Gone),
    Case(
        "an engine that fails", Cause.ENGINE, "400", script=CALL_OR_NOT,
        play=lambda _prompt, _request: Reply((), status=400),
    ),
    Case(
        "an engine that is out of order", Cause.ENGINE_LOST, "500", script=CALL_OR_NOT,
        play=lambda _prompt, _request: Reply((), status=500),
    ),
    Case(
        "an engine that is lost in the middle of an answer", Cause.ENGINE_LOST, "cut short",
        script=STREAM, play=_cut_first,
    ),
    Case(
        "a recording that is removed while its session runs", Cause.NODE, "No such file",
        at_build=lambda folder: next((folder / "gateway").glob("s9.*.rec")).unlink(),
    ),
    Case(
        "a builder that breaks", Cause.NODE, "ZeroDivisionError",
        change={"builder": PluginSpec("bad_parts:Broken")},
    ),
    Case(
        "an evaluator that hangs", Cause.EVAL_TIMEOUT, "eval was out of time",
        change={"evaluator": PluginSpec("bad_parts:Hanging")}, limits=Limits(eval_s=0.3),
    ),
    Case(
        "an evaluator that crashes", Cause.EVALUATOR, "KeyError: 'score'",
        change={"evaluator": PluginSpec("bad_parts:Crashing")},
    ),
    Case(
        "tests that nobody can run", Cause.EVALUATOR, "no test functions",
        change={"files": {"bill.py": FILES["bill.py"]}},
    ),
]  # fmt: skip
TIMED_OUT = [
    Case(
        "an agent out of time", Cause.AGENT_TIMEOUT, "agent_timeout", script=ENDLESS,
        limits=Limits(agent_s=2.0), reward=1.0, check=_partial,
    ),
    Case(
        "a session whose time is over while the agent works", Cause.TOTAL_TIMEOUT,
        "total_s was over in run", script=ENDLESS, total_s=3.0, check=_partial,
    ),
    Case(
        "a session whose time is over while traces are built", Cause.WAIT_TIMEOUT,
        "total_s was over in build", script=ASK, total_s=4.0,
        change={"builder": PluginSpec("bad_parts:Sleepy")},
    ),
]  # fmt: skip
COMPLETED = [
    Case("an agent that gives up after a model call", None, script=f"{ASK}; exit 3", reward=0.0),
    Case(
        "a sandbox that cannot be cleared", None, runtime=PluginSpec("bad_parts:Unclosed"),
        reward=1.0, check=_partial,
    ),
    Case(
        "a folder that is read-only", None, workspace={"folder": "{folder}/base"}, script=UNSEALED,
        change={"files": {"test_bill.py": FILES["test_bill.py"]}}, reward=1.0, before=_base,
    ),
    Case(
        "an agent that takes all memory", Cause.AGENT_MEMORY, "agent_memory", script=EAT,
        runtime=PluginSpec("bubblewrap", {"memory_mb": 200}), reward=0.0, check=_partial,
    ),
    Case(
        "an agent that fills the disk", Cause.AGENT_DISK, "agent_disk", script=FILL,
        runtime=PluginSpec("bubblewrap", {"disk_mb": 32}), reward=0.0, check=_partial,
    ),
    Case(
        "output and names that are no text", None, script=ODD, reward=1.0, check=_odd_bytes,
        change={"evaluator": PluginSpec("bad_parts:Noting")},
    ),
]  # fmt: skip
CASES = {Status.FAILED: FAILED, Status.TIMED_OUT: TIMED_OUT, Status.COMPLETED: COMPLETED}
"""By the status that the session must end with."""


def a_task(case: Case, folder: Path, mark: str) -> Task:
    """The case's task."""
    agent = PluginSpec("shell", {"command": ["sh", "-c", f": {mark}; {case.script}"]})
    given: dict[str, Any] = {"harness": agent, "evaluator": PluginSpec("tests"), "files": FILES}
    workspace = {
        name: text.replace("{folder}", str(folder)) for name, text in case.workspace.items()
    }
    fixed = {"runtime": case.runtime, "limits": case.limits, "workspace": Workspace(**workspace)}
    return Task(id="t", instruction="Mend it.", **{**given, **fixed, **case.change})


def mounts(folder: Path) -> list[str]:
    """File systems mounted below `folder`."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(str(folder))]


@pytest.fixture
def prepared(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Case]:
    """The case, with its folder prepared."""
    if case.marks == PODMAN:
        engine = {"engine": request.getfixturevalue("podman"), "pull": "never"}
        case = dataclasses.replace(case, runtime=PluginSpec("container", engine))
    reason = Bubblewrap().check_available() if case.runtime.name == "bubblewrap" else None
    if reason is not None:
        pytest.skip(reason)
    if case.before is not None:
        case.before(tmp_path)
    yield case
    if case.after is not None:
        case.after(tmp_path)
    assert not mounts(tmp_path)


@pytest.mark.parametrize(
    ("status", "case"),
    [
        pytest.param(status, case, id=case.name, marks=case.marks)
        for status, cases in CASES.items()
        for case in cases
    ],
)
async def test_a_bad_case_is_a_typed_result(status: Status, prepared: Case, tmp_path: Path) -> None:
    """Status, cause, boundary and a message that names the thing; in time; nothing is left."""
    case, mark, stages = prepared, token(), [Status.QUEUED]
    mounted = len(mounts(tmp_path))

    def on_stage(status: Status) -> None:
        stages.append(status)
        if status is Status.BUILD and case.at_build is not None:
            case.at_build(tmp_path)

    folder = tmp_path / "gateway"
    async with rig(folder, case.play, tuning=QUICK) as model, asyncio.timeout(45):
        trajectory = await roll_out(
            a_task(case, tmp_path, mark),
            Session(id="s9", task="t", sample=0),
            gateway=case.gateway(model.gateway),
            directory=tmp_path / "session",
            parts=Parts(),
            on_stage=on_stage,
            slots=StageSlots(case.total_s, eval_grace_s=0.5),
        )
    failure = trajectory.failure
    assert (failure.cause if failure else None) is case.cause, failure
    assert trajectory.status is status
    for before, after in itertools.pairwise([*stages, status]):
        assert after in TRANSITIONS[before]
    if failure is not None and case.cause is not None:
        assert failure.boundary is HANDLING[case.cause].boundary
        assert case.message.replace("{folder}", str(tmp_path)) in failure.message
        assert len(failure.message) < 2000
        assert (trajectory.reward is not None) is HANDLING[case.cause].evaluated
    assert (trajectory.reward.value if trajectory.reward else None) == case.reward
    assert trajectory.ledger.balanced
    assert decode(encode(trajectory), Trajectory).status is status
    if case.check is not None:
        case.check(tmp_path, trajectory)
    assert not running(mark)
    assert not running(str(tmp_path / "session"))
    assert len(mounts(tmp_path)) == mounted
    if case.marks:
        assert not await asyncio.to_thread(left, case.runtime.options["engine"], tmp_path)


def test_every_cause_has_a_case() -> None:
    """No row of the table of what follows a failure is there for nothing."""
    causes = {case.cause for cases in CASES.values() for case in cases}
    assert causes - {None} == set(HANDLING)


@pytest.mark.parametrize(
    ("stage", "error", "cause"),
    [
        (Status.INIT, OSError("x"), Cause.NODE),
        (Status.RUN, OSError(errno.EDQUOT, "x"), Cause.DISK),
        (Status.BUILD, EngineError("no ids"), Cause.ENGINE),
        (Status.BUILD, CaptureError("no ids"), Cause.ENGINE),
        (Status.BUILD, TimeoutError(errno.ETIMEDOUT, "a file system's"), Cause.NODE),
        (Status.EVAL, UsageError("x"), Cause.EVALUATOR),
    ],
)
def test_a_failure_follows_from_stage_and_error(
    stage: Status, error: Exception, cause: Cause
) -> None:
    """The type decides, then the stage, also where no case above has such an error."""
    failure = classify(stage, error)
    assert (failure.cause, failure.boundary) == (cause, HANDLING[cause].boundary)
    assert str(error) in failure.message
