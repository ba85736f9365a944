"""Replay a recorded session, or fork from it: the whole rollout, with a recording for an engine.

Everything that a rollout has is there: runtime, budgets, evaluator, and a recording of its own,
from which a fork builds like any other session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import UsageError
from tugline.gateway.app import Gateway, Opened
from tugline.recording.file import read
from tugline.recording.folder import load_tokenizer
from tugline.recording.records import Header, Result
from tugline.replay.difference import Difference
from tugline.replay.normalizers import Normalizers, places
from tugline.replay.place import SamePlace, Start, mountable
from tugline.replay.recorded import Live, Recorded
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.sandbox.base import HOME, Runtime
from tugline.types import Boundary, Call, Failure, Mode, PluginSpec, Reward, Session, Status, Task


@dataclass(frozen=True, slots=True)
class Recording:
    """What is replayed."""

    header: Header
    calls: tuple[Call, ...]
    result: Result | None
    tokenizer: Tokenizer | None

    @classmethod
    def load(cls, recording: Path, tokenizer: Path | None = None) -> Recording:
        """Read a recording and its tokenizer. Raises `CaptureError` or `UsageError`."""
        found = read(recording, bodies=False)
        if found.header is None or not found.calls:
            what = "says not whose session it is" if found.header is None else "holds no calls"
            msg = f"{recording} {what}; there is nothing to replay"
            raise UsageError(msg)
        known = load_tokenizer(recording, found.header, tokenizer)
        if known is None and found.header.mode is Mode.EXACT:
            msg = f"the tokenizer of {recording} is not beside it; give it with --tokenizer"
            raise UsageError(msg)
        return cls(found.header, found.calls, found.result, known)

    def rendering(self) -> Rendering | None:
        """What made its prompts; None where the engine did."""
        header = self.header
        if header.mode is not Mode.EXACT or self.tokenizer is None:
            return None
        retention = header.thinking_retention
        return Rendering(self.tokenizer, header.template, thinking_retention=retention)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one replay or fork."""

    session: str
    harness: str
    version: str | None
    """Of the harness that ran."""
    recorded: int
    """Answers that were to be replayed."""
    replayed: int
    exact: int | None
    """Of those, the requests with the recorded prompt, id for id; None where ids are not made."""
    adapted: int
    """Of the replayed, the answers in which a recorded value became this run's."""
    live: int
    """Answers that an engine gave."""
    differences: tuple[Difference, ...]
    masked: dict[str, dict[str, str]]
    """Mask to recorded value to this run's, where the two differ."""
    same_place: bool
    """Whether programs found their folder where the recorded ones did."""
    recording: str
    """Its path; empty where it was not kept."""
    status: Status
    reward: Reward | None = None
    recorded_reward: Reward | None = None
    failure: Failure | None = None

    @property
    def as_recorded(self) -> bool:
        """Whether every recorded answer was asked for, and nothing else before the fork."""
        return not self.differences and not self.broken

    @property
    def broken(self) -> bool:
        """Whether it failed otherwise than by having no verdict, which many recordings lack."""
        return self.failure is not None and self.failure.boundary is not Boundary.EVALUATOR


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay."""

    go_on: bool = False
    """Answer a request that differs as the one it comes nearest to."""
    masks: tuple[str, ...] = ()
    """Regular expressions of what may differ, beside the built-in ones."""
    harness_version: str | None = None


async def replay(recording: Recording, folder: Path, options: Options | None = None) -> Report:
    """Run the harness again in the new `folder`, on the recorded answers alone."""
    (report,) = await _perform(recording, folder, [recording.header.session], options or Options())
    return report


async def fork(
    recording: Recording, folder: Path, live: Live, options: Options | None = None
) -> list[Report]:
    """Sessions that are replayed up to call `live.at` and sampled from there on.

    Each has a recording of its own in the new `folder`, with the replayed calls marked as such. The
    samples are numbered after those of the task, so that none draws from a seed that was used.
    """
    if not 0 <= live.at <= len(recording.calls):
        msg = f"--fork-at is {live.at}, must be from 0 to {len(recording.calls)}, all its calls"
        raise UsageError(msg)
    old = recording.header.session
    others = max(recording.header.task.samples, old.sample + 1)
    sessions = [
        Session(id=f"{old.id}-at{live.at}-{n}", task=old.task, sample=others + n)
        for n in range(live.first, live.first + live.samples)
    ]
    return await _perform(recording, folder, sessions, options or Options(), live)


async def _perform(
    recording: Recording,
    folder: Path,
    sessions: Sequence[Session],
    options: Options,
    live: Live | None = None,
) -> list[Report]:
    header = recording.header
    task = _task(header.task, options.harness_version)
    with _place(header) as start:
        parts = _Parts(header, start)
        harness = parts.harness(task.harness)
        here = {} if start else {one.id: _places(_directory(folder, one)) for one in sessions}
        source = _source(recording, options, live, here, harness.spent_status)
        gateway = _Gateway(source, recording.rendering(), folder / "recordings")
        if start:
            gateway.folders = {"workdir": header.workdir, "home": header.home}
        gate = asyncio.Semaphore(live.slots if live else 1)

        async def one(session: Session) -> Report:
            directory = _directory(folder, session)
            async with gate:
                trajectory = await roll_out(
                    task, session, gateway=gateway, directory=directory, parts=parts
                )
            run = source.run(session.id)
            rest = [take for take in run.left if take.needed]
            if rest and run.asked and not run.ended:
                where = f"the end: {len(rest)} of the recorded requests were not made"
                run.note(Difference(run.asked, rest[0].call.number, where))
            return Report(
                session=session.id,
                harness=task.harness.name,
                version=harness.version,
                recorded=len(source.takes),
                replayed=run.replayed,
                exact=run.exact if header.mode is Mode.EXACT else None,
                adapted=run.adapted,
                live=run.live,
                differences=tuple(run.differences),
                masked=run.masked,
                same_place=start is not None,
                recording=str(gateway.recording_path(session)),
                status=trajectory.status,
                reward=trajectory.reward,
                recorded_reward=recording.result.reward if recording.result else None,
                failure=trajectory.failure,
            )

        async with gateway:
            return list(await asyncio.gather(*map(one, sessions)))


def _source(
    recording: Recording,
    options: Options,
    live: Live | None,
    here: Mapping[str, Mapping[str, str]],
    status: int,
) -> Recorded:
    """The recording as an engine; `here` has the folders of sessions that are not in its place."""
    was = places(recording.header.workdir, recording.header.home)
    return Recorded(
        recording.header,
        recording.calls,
        Normalizers(was, options.masks),
        lambda session: Normalizers(here.get(session, was), options.masks),
        tokenizer=recording.tokenizer,
        spent_status=status,
        go_on=options.go_on,
        live=live,
    )


def _task(task: Task, version: str | None) -> Task:
    """The recorded task, with another version of its harness if one is named."""
    if version is None:
        return task
    part = PluginSpec(task.harness.name, {**task.harness.options, "version": version})
    return msgspec.structs.replace(task, harness=part)


# --------------------------------------------------------------------------- where it runs
def _directory(folder: Path, session: Session) -> Path:
    return folder / "sessions" / f"{session.id}.{session.epoch}"


def _places(directory: Path) -> dict[str, str]:
    """The folders that a rollout in `directory` gives its agent."""
    agent = Path.cwd() / directory / "agent"
    return places(str(agent / "work"), str(agent / "home"))


@contextlib.contextmanager
def _place(header: Header) -> Iterator[Start | None]:
    """How programs are started to find their folder where the recorded ones did; None if not."""
    if not _was_local(header) or Path(header.home).parent != Path(header.workdir).parent:
        yield None
        return
    with mountable(Path(header.workdir).parent) as start:
        yield start


def _was_local(header: Header) -> bool:
    """Whether its session had folders of its own; sandboxes give the same ones to all."""
    named = header.task.runtime.name in {"auto", "local"}
    return named and bool(header.workdir) and Path(header.home) != Path(HOME)


class _Parts(Parts):
    """The task's parts, but a runtime whose programs are where the recorded ones were."""

    def __init__(self, header: Header, start: Start | None) -> None:
        super().__init__()
        self._old, self._start = Path(header.workdir).parent, start
        self._was_local = _was_local(header)

    def runtime(self, part: PluginSpec) -> Runtime:
        """The place where it runs."""
        inner = super().runtime(
            PluginSpec("local") if self._was_local and part.name == "auto" else part
        )
        return inner if self._start is None else SamePlace(inner, self._old, self._start)


class _Gateway(Gateway):
    """A gateway that writes down where programs see their folders."""

    folders: Mapping[str, str] = MappingProxyType({})

    @contextlib.asynccontextmanager
    async def open(self, session: Session, task: Task, **how: Any) -> AsyncIterator[Opened]:
        """See `tugline.gateway.app.Gateway.open`."""
        async with super().open(session, task, **{**how, **self.folders}) as opened:
            yield opened
