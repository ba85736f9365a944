"""Judge a recorded session again: its stored patch, another evaluator, fresh sandboxes.

No agent and no engine takes part. The evaluation is that of a rollout (`evaluation`), with what it
would have got: the task, the patch, the calls, the traces built from them, and the agent's exit,
whose output alone is not recorded.
"""

import asyncio
import contextlib
import getpass
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from tugline.errors import CaptureError, UsageError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.patch import Patch, unpack_patch
from tugline.recording.file import Recording, read
from tugline.recording.folder import file_name, parse_name
from tugline.recording.patches import describe_no_patch, load_patch, refuse_result
from tugline.recording.verdicts import VerdictEntry, VerdictHistory
from tugline.rollout.evaluation import evaluate_outcome
from tugline.rollout.failures import EarlyEnd, End, classify
from tugline.rollout.parts import Parts, PrewarmedSandboxes, TaskSandboxes
from tugline.rollout.stage_runner import OnStage, StageRunner
from tugline.rollout.stages import StageSlots
from tugline.rollout.task_validation import fingerprint_evaluator
from tugline.sandbox.base import Exit
from tugline.sandbox.files import remove
from tugline.schema import copy_fields
from tugline.types import Ledger, PluginSpec, Session, Status, Task, Trajectory


def refuse_evaluator(spec: PluginSpec, evaluator: Evaluator) -> str:
    """Return why an evaluator cannot judge recorded sessions; empty if it can."""
    if not evaluator.in_place:
        return ""
    return (
        f"evaluator {spec.name!r} is in_place: it judges in the agent's sandbox, which no longer "
        "exists"
    )


def refuse_session(recording: Recording) -> str:
    """Return why a session cannot be judged again; empty if it can."""
    result = recording.result
    if recording.header is None:
        return "the first record of its recording is lost"
    return describe_no_patch(None) if result is None else refuse_result(result)


async def judge_again(
    recording: Recording,
    patch: Patch,
    spec: PluginSpec,
    directory: Path,
    parts: Parts,
    slots: StageSlots | None = None,
) -> Verdict:
    """Judge a session that `refuse_session` accepts, in the new folder `directory`.

    Without `slots` it does not wait. Raises the errors of `evaluate_outcome`, of creating a
    plug-in, and of opening a sandbox.
    """
    header = recording.header
    result = recording.result
    if header is None or result is None:
        raise CaptureError("the recording is incomplete")
    task = replace(header.task, evaluator=spec)
    await parts.report_weaknesses(task.runtime)
    built = await asyncio.to_thread(parts.builder(task.builder).build, recording.calls)
    outcome = SessionOutcome(
        task=task,
        patch=patch,
        open_sandbox=PrewarmedSandboxes(TaskSandboxes(task, directory, parts).open_evaluation).open,
        timeout_s=task.limits.eval_s,
        calls=recording.calls,
        traces=built.traces,
        exit=copy_fields(Exit, result.exit) if result.exit else None,
        spent=result.spent,
    )
    session = header.session.id
    return await evaluate_outcome(parts.evaluator(spec), outcome, slots or StageSlots(), session)


# --------------------------------------------------------------------------- on a node
async def run_judging(  # noqa: PLR0913 - a session, its environment and its observer
    task: Task,
    session: Session,
    *,
    recordings: Path,
    directory: Path,
    parts: Parts,
    on_stage: OnStage,
    slots: StageSlots,
) -> Trajectory:
    """Judge the recorded session that `task` names, in place of running an agent.

    The trajectory has a verdict and no traces. In any case there is one, as from `roll_out`.
    """
    stages = StageRunner(session.id, on_stage, slots)
    verdict = None
    end = End(None, Status.COMPLETED)
    try:
        async with stages.run(Status.EVAL):
            recording, packed = await asyncio.to_thread(_load, task, recordings)
            patch = unpack_patch(packed)
            verdict = await judge_again(recording, patch, task.evaluator, directory, parts, slots)
    except EarlyEnd as early:
        end = early.end
    return Trajectory(
        session=session.id,
        task=task.id,
        sample=session.sample,
        status=end.status,
        traces=(),
        ledger=Ledger(),
        reward=verdict.reward if verdict else None,
        report=verdict.report if verdict else {},
        failure=end.failure,
        seconds=stages.seconds,
        engine_s=0.0,
        prompt_tokens=0,
        harness=task.harness.name,
    )


def _load(task: Task, recordings: Path) -> tuple[Recording, bytes]:
    """Read the recording that a task names, and its packed patch. Raises `CaptureError`."""
    judged = task.judges
    if judged is None:
        raise CaptureError(f"task {task.id} names no recorded session")
    own = Session(id=judged.session, task=task.id, sample=0, epoch=judged.epoch)
    path = recordings / file_name(own)
    if not path.exists():
        msg = (
            f"session {judged.session} was recorded on node {judged.node!r} in {path}, which is no "
            "longer there; see node.keep_s and node.quota_gb"
        )
        raise CaptureError(msg)
    recording = read(path)
    if (reason := refuse_session(recording)) or recording.result is None:
        raise CaptureError(f"session {judged.session}: {reason}")
    return recording, load_patch(path, recording.result.patch)


# --------------------------------------------------------------------------- many sessions
class SessionVerdicts(NamedTuple):
    """Outcome for one recording."""

    session: str
    entries: tuple[VerdictEntry, ...] = ()
    """A verdict or an error for each round; verdicts may be of an earlier call."""
    refused: str = ""
    """Why it was not judged."""

    @property
    def before(self) -> float | None:
        """The recorded reward; None without any."""
        return self.entries[0].before if self.entries else None

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The reward of each round; None for an error."""
        return tuple(each.reward.value if each.reward else None for each in self.entries)


class Rejudger:
    """Judges the recordings of a run again, and keeps the history of the verdicts in a folder."""

    def __init__(
        self, run: Path, folder: Path, spec: PluginSpec | None, rounds: int, name: str = ""
    ) -> None:
        """`spec` is the evaluator; None uses that of each task. Each session has `rounds` verdicts.

        `name` is the name of the evaluator's file in the history.

        Raises `UsageError` if `folder` has another kind of history, and for an evaluator that is
        unknown, has invalid options, or cannot judge recorded sessions.
        """
        self.parts = Parts()
        self.work = folder / "work"
        """Folder of the sandboxes."""
        self._run = run
        self.history = VerdictHistory(folder)
        self._name = name
        self._spec = spec
        self._rounds = range(1, rounds + 1)
        self._by = name_user()
        self._digests: dict[bytes, str] = {}
        self._numbers = itertools.count()
        self._adding = asyncio.Lock()
        if spec is not None and (reason := refuse_evaluator(spec, self.parts.evaluator(spec))):
            raise UsageError(reason)

    async def judge(self, path: Path) -> SessionVerdicts:
        """Judge a recording in each round without a verdict.

        A failure is an entry with an error, so that it does not affect other sessions (I5). Raises
        `OSError` if the history cannot be written.
        """
        session, _ = parse_name(path)
        try:
            recording = await asyncio.to_thread(read, path)
        except CaptureError as error:
            return SessionVerdicts(session, (self._make_entry(path, session, error=str(error)),))
        if reason := refuse_session(recording):
            return SessionVerdicts(session, refused=reason)
        entries = []
        for number in self._rounds:
            entry = await self._judge_round(path, recording, number)
            if isinstance(entry, str):
                return SessionVerdicts(session, refused=entry)
            entries.append(entry)
        return SessionVerdicts(session, tuple(entries))

    async def _judge_round(
        self, path: Path, recording: Recording, number: int
    ) -> VerdictEntry | str:
        """Return the verdict of a round, or the reason why the session is refused."""
        header = recording.header
        result = recording.own_result
        if header is None or result is None:
            raise CaptureError(f"{path} is incomplete")
        spec = self._spec or header.task.evaluator
        entry = self._make_entry(
            path,
            header.session.id,
            task=header.task.id,
            evaluator=spec.name,
            name=self._name,
            round=number,
            patch=result.patch,
            before=result.reward.value if result.reward else None,
        )
        began = time.monotonic()
        try:
            entry = replace(entry, digest=await self._digest(spec))
            if (known := self.history.verdicts.get(entry.key)) is not None:
                return known
            if reason := refuse_evaluator(spec, self.parts.evaluator(spec)):
                return reason
            packed = await asyncio.to_thread(load_patch, path, result.patch)
            verdict = await self._judge_in_folder(recording, unpack_patch(packed), spec)
        except Exception as error:  # noqa: BLE001 - also of a plug-in's own code
            entry = replace(entry, error=classify(Status.EVAL, error).message)
        else:
            entry = replace(entry, reward=verdict.reward, report=verdict.report)
        entry = replace(entry, at=time.time(), seconds=time.monotonic() - began)
        async with self._adding:
            await asyncio.to_thread(self.history.add, entry)
        return entry

    async def _judge_in_folder(
        self, recording: Recording, patch: Patch, spec: PluginSpec
    ) -> Verdict:
        name = str(next(self._numbers))
        try:
            return await judge_again(recording, patch, spec, self.work / name, self.parts)
        finally:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(remove, self.work, name)

    async def _digest(self, spec: PluginSpec) -> str:
        """Return the digest of an evaluator, whose files are read once."""
        key = msgspec.msgpack.encode(spec, order="deterministic")
        if key not in self._digests:
            self._digests[key] = await asyncio.to_thread(fingerprint_evaluator, spec)
        return self._digests[key]

    def _make_entry(self, path: Path, session: str, **fields: Any) -> VerdictEntry:
        """Make an entry without a verdict."""
        given = {
            "task": session.rpartition("-")[0],
            "evaluator": "",
            "digest": "",
            "patch": "",
            "before": None,
            "at": time.time(),
            **fields,
        }
        name = path.relative_to(self._run).as_posix()
        return VerdictEntry(recording=name, session=session, by=self._by, **given)


def name_user() -> str:
    """Return who judges, as ``user@machine``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
