"""Trajectories made again from recordings alone: the trainer depends on nothing that is not there.

The outcome comes from the recorded result, never from a clock, so the same recordings and the same
builder give the same bytes, run after run. One session is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tugline.errors import CaptureError, UsageError
from tugline.recording import file as recordings
from tugline.recording.file import Recording
from tugline.recording.trajectories import INDEX, Index, IndexEntry, pack
from tugline.recording.verify.ledgers import builder_of
from tugline.types import Boundary, Failure, PluginSpec, Status, Trajectory

UNENDED = Failure(Boundary.INFRASTRUCTURE, "no result is recorded: the session did not end")


def rebuild(recording: Recording, part: PluginSpec | None = None) -> Trajectory:
    """The trajectory of a session, by its task's own builder or the one that `part` names.

    A session without a recorded result is a failed one, so that no trainer learns from it. Rewards
    per trace are left out where another builder makes other traces. Raises `CaptureError` on a call
    or a recording that lacks parts, `UsageError` on a builder that is not here.
    """
    header, result = recording.header, recording.result
    if header is None:
        msg = "the recording has no header, so it is not known whose it is"
        raise CaptureError(msg)
    own = header.task.builder
    traces, ledger = builder_of(part or own).build(recording.calls)
    reward = result.reward if result else None
    if reward is not None and part not in (None, own):
        reward = msgspec.structs.replace(reward, per_trace=())
    return Trajectory(
        session=header.session.id,
        task=header.task.id,
        sample=header.session.sample,
        status=result.status if result else Status.FAILED,
        traces=traces,
        ledger=ledger,
        reward=reward,
        report=result.report if result else {},
        failure=result.failure if result else UNENDED,
        seconds=result.seconds if result else {},
    )


def rebuild_all(
    found: list[Path],
    root: Path,
    out: Path,
    part: PluginSpec | None,
    *,
    salvage: bool = False,
    on_file: Callable[[], None] = lambda: None,
) -> Index:
    """Write ``<session>.traj`` for each recording, and the index; `root` is what names are below.

    `part` is the builder of all, None each session's own. Of several attempts at a session the last
    one counts. A recording that cannot be read or built has an entry that says why.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        msg = f"--out {out} must be a new or an empty folder"
        raise UsageError(msg)
    if part is not None:
        builder_of(part)
    entries = []
    superseded = _superseded(found)
    for path in found:
        name, (session, _) = path.relative_to(root).as_posix(), _attempt(path)
        if path in superseded:
            entries.append(
                IndexEntry(session=session, recording=name, note="a later attempt counts")
            )
        else:
            file = Path(name).with_name(f"{session}.traj")
            entries.append(_one(path, name, out, file, part, salvage=salvage))
        on_file()
    index = Index(builder=part, entries=tuple(entries))
    out.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.encode(index, order="deterministic")
    (out / INDEX).write_bytes(msgspec.json.format(data, indent=1))
    return index


def _one(
    path: Path, name: str, out: Path, file: Path, part: PluginSpec | None, *, salvage: bool
) -> IndexEntry:
    session = file.stem
    try:
        recording = recordings.read(path, salvage=salvage, bodies=False)
        trajectory = rebuild(recording, part)
    except (CaptureError, UsageError) as error:
        return IndexEntry(session=session, recording=name, error=str(error))
    data = pack(trajectory)
    target = out / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return IndexEntry(
        session=trajectory.session,
        recording=name,
        file=file.as_posix(),
        sha256=hashlib.sha256(data).hexdigest(),
        traces=len(trajectory.traces),
        tokens=sum(len(trace.ids) for trace in trajectory.traces),
        ledger=trajectory.ledger,
        note="; ".join(_notes(recording)),
    )


def _notes(recording: Recording) -> Iterator[str]:
    if recording.result is None:
        yield UNENDED.message
    if recording.torn_bytes:
        yield f"a torn tail of {recording.torn_bytes} bytes was not read"
    if recording.damage:
        yield f"made of what comes before the damage: {recording.damage}"


def _superseded(found: list[Path]) -> set[Path]:
    """Those of which the same folder has a later attempt at the same session."""
    latest: dict[tuple[Path, str], tuple[int, Path]] = {}
    for path in found:
        session, epoch = _attempt(path)
        key = (path.parent, session)
        latest[key] = max(latest.get(key, (epoch, path)), (epoch, path))
    return set(found) - {path for _, path in latest.values()}


def _attempt(path: Path) -> tuple[str, int]:
    """Session and epoch, by the file's name."""
    session, _, epoch = path.stem.rpartition(".")
    return (session, int(epoch)) if session and epoch.isdecimal() else (path.stem, 0)
