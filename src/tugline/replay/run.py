"""Replay a recorded session, or fork from it: a rollout on a recording instead of an engine.

Runtime, budgets and evaluator are those of any rollout. The new recording is an ordinary one, which
builders, exports and forks can use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tugline.chat.tokenizer import Tokenizer
from tugline.errors import UsageError
from tugline.gateway.app import Gateway
from tugline.recording.file import read
from tugline.recording.records import Header, RecordedResult
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.recording.verify.text import make_rendering
from tugline.replay.matching import Difference
from tugline.replay.source import Live, RecordedSource
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.schema import copy_fields
from tugline.types import Boundary, Call, Failure, Mode, PluginSpec, Reward, Session, Status, Task


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """A session to replay."""

    header: Header
    calls: tuple[Call, ...]
    result: RecordedResult | None
    tokenizer: Tokenizer | None

    @classmethod
    def load(cls, path: Path, tokenizer: Path | None = None) -> RecordedSession:
        """Read a recording and its tokenizer. Raises `CaptureError` or `UsageError`."""
        recording = read(path)
        header = recording.header
        if header is None or not recording.calls:
            what = "has no header" if header is None else "has no calls"
            raise UsageError(f"{path} {what}, so it cannot be replayed")
        loaded = load_tokenizer(path, header, tokenizer)
        if loaded is None and header.mode is Mode.EXACT:
            raise UsageError(f"there is no tokenizer beside {path}; give one with --tokenizer")
        return cls(header, recording.calls, recording.result, loaded)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay or fork."""

    session: str
    harness: str
    version: str | None
    """Version of the harness."""
    recorded: int
    """Number of responses to replay."""
    replayed: int
    exact: int | None
    """Number of replayed requests with the recorded prompt ids; None if the engine renders."""
    adapted: int
    """Number of replayed answers in which a recorded value was replaced by this run's."""
    live: int
    """Number of answers from the engine."""
    differences: tuple[Difference, ...]
    masked: dict[str, dict[str, str]]
    """Differing values: mask name to recorded value to this run's value."""
    recording: str
    """Path of the new recording; empty if it was not kept."""
    status: Status
    reward: Reward | None = None
    recorded_reward: Reward | None = None
    failure: Failure | None = None

    @property
    def as_recorded(self) -> bool:
        """Whether all recorded requests were made, and no others before the fork."""
        return not self.differences and not self.broken

    @property
    def broken(self) -> bool:
        """Whether the session failed for a reason other than its evaluator."""
        return self.failure is not None and self.failure.boundary is not Boundary.EVALUATOR


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a replay."""

    go_on: bool = False
    """Whether a different request is answered with the most similar response."""
    masks: tuple[str, ...] = ()
    """Regular expressions to mask in addition to the built-in ones."""
    harness_version: str | None = None
    on_session: Callable[[], None] = lambda: None
    """Callback when a session has ended."""


async def replay(
    session: RecordedSession, folder: Path, options: Options | None = None
) -> ReplayReport:
    """Run the harness again in the new `folder`, with recorded responses only."""
    (report,) = await _run_all(session, folder, [session.header.session], options or Options())
    return report


def check_fork(session: RecordedSession, at: int) -> None:
    """Raise `UsageError` if the session cannot be forked at call `at`."""
    if not 0 <= at <= len(session.calls):
        msg = f"--fork-at is {at}, must be from 0 to {len(session.calls)}, the number of calls"
        raise UsageError(msg)


async def fork(
    session: RecordedSession, folder: Path, live: Live, options: Options | None = None
) -> list[ReplayReport]:
    """Run sessions that are replayed up to call `live.at` and sampled from then on.

    Each has a recording in the new `folder`, with the replayed calls marked. Sample numbers follow
    those of the task, so that no seed is used twice.
    """
    check_fork(session, live.at)
    old = session.header.session
    others = max(session.header.task.samples, old.sample + 1)
    sessions = [
        Session(id=f"{old.id}-at{live.at}-{n}", task=old.task, sample=others + n)
        for n in range(live.first, live.first + live.samples)
    ]
    return await _run_all(session, folder, sessions, options or Options(), live)


async def _run_all(
    recorded: RecordedSession,
    folder: Path,
    sessions: Sequence[Session],
    options: Options,
    live: Live | None = None,
) -> list[ReplayReport]:
    header = recorded.header
    task = _make_task(header.task, options.harness_version)
    parts = Parts()
    harness = parts.harness(task.harness)
    source = RecordedSource(
        header,
        recorded.calls,
        options.masks,
        tokenizer=recorded.tokenizer,
        spent_status=harness.spent_status,
        go_on=options.go_on,
        live=live,
    )
    rendering = make_rendering(header, recorded.tokenizer) if recorded.tokenizer else None
    gateway = Gateway(source, rendering, folder / "recordings")
    slots = asyncio.Semaphore(live.slots if live else 1)

    async def run(session: Session) -> ReplayReport:
        directory = folder / "sessions" / f"{session.id}.{session.epoch}"
        async with slots:
            trajectory = await roll_out(
                task, session, gateway=gateway, directory=directory, parts=parts
            )
        options.on_session()
        state = source.state(session.id)
        missing = [response for response in state.remaining if response.required]
        if missing and state.requests and not state.ended:
            where = f"end of the session: {len(missing)} recorded requests were not made"
            state.add_difference(Difference(state.requests, missing[0].call.number, where))
        return copy_fields(
            ReplayReport,
            trajectory,
            state,
            session=session.id,
            version=harness.version,
            recorded=len(source.responses),
            exact=state.exact if header.mode is Mode.EXACT else None,
            differences=tuple(state.differences),
            recording=str(gateway.recording_path(session)),
            recorded_reward=recorded.result.reward if recorded.result else None,
        )

    async with gateway:
        return list(await asyncio.gather(*map(run, sessions)))


def _make_task(task: Task, version: str | None) -> Task:
    """Return the recorded task, with another version of its harness if given."""
    if version is None:
        return task
    spec = PluginSpec(task.harness.name, {**task.harness.options, "version": version})
    return msgspec.structs.replace(task, harness=spec)
