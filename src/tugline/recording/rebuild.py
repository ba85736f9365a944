"""Rebuild trajectories from recordings alone.

The outcome comes from the recorded result, never from a clock, so the same recordings and the same
builder give the same bytes. One session is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tugline.errors import CaptureError, UsageError
from tugline.recording.file import Recording, read
from tugline.recording.folder import parse_name
from tugline.recording.trajectories import INDEX, Index, IndexEntry, describe, pack
from tugline.traces.base import make_builder
from tugline.types import Boundary, Failure, PluginSpec, Status, Trajectory

NO_RESULT = Failure(Boundary.INFRASTRUCTURE, "no result is recorded: the session did not end")


def rebuild(recording: Recording, spec: PluginSpec | None = None) -> Trajectory:
    """Build the trajectory of a session with its task's own builder or the one of `spec`.

    A session without a recorded result is a failed one, so that no trainer learns from it. Rewards
    per trace are omitted if another builder makes other traces. Raises `CaptureError` on an
    incomplete call or recording, `UsageError` on an unknown builder.
    """
    header, result = recording.header, recording.result
    if header is None:
        msg = "the recording has no header, so its session is not known"
        raise CaptureError(msg)
    own = header.task.builder
    traces, ledger, _ = make_builder(spec or own).build(recording.calls)
    reward = result.reward if result else None
    if reward is not None and spec not in (None, own):
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
        failure=result.failure if result else NO_RESULT,
        seconds=result.seconds if result else {},
    )


def rebuild_all(
    paths: list[Path],
    root: Path,
    out: Path,
    spec: PluginSpec | None,
    *,
    salvage: bool = False,
    on_file: Callable[[], None] = lambda: None,
) -> Index:
    """Write ``<session>.traj`` for each recording, and the index; names are relative to `root`.

    `spec` is the builder of all, None each session's own. Of several attempts at a session the
    last one counts. A recording that cannot be read or built has an entry with the error.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        msg = f"--out {out} must be a new or an empty folder"
        raise UsageError(msg)
    if spec is not None:
        make_builder(spec)
    superseded = _find_superseded(paths)
    entries = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        session, _ = parse_name(path)
        if path in superseded:
            note = "a later attempt counts"
            entries.append(IndexEntry(session=session, recording=name, note=note))
        else:
            file = Path(name).with_name(f"{session}.traj")
            entries.append(_rebuild_one(path, name, out, file, spec, salvage=salvage))
        on_file()
    index = Index(builder=spec, entries=tuple(entries))
    out.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.encode(index, order="deterministic")
    (out / INDEX).write_bytes(msgspec.json.format(data, indent=1))
    return index


def _rebuild_one(
    path: Path, name: str, out: Path, file: Path, spec: PluginSpec | None, *, salvage: bool
) -> IndexEntry:
    try:
        recording = read(path, salvage=salvage, bodies=False)
        trajectory = rebuild(recording, spec)
    except (CaptureError, UsageError) as error:
        return IndexEntry(session=file.stem, recording=name, error=str(error))
    data = pack(trajectory)
    target = out / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    entry = describe(trajectory, file.as_posix(), data)
    return msgspec.structs.replace(entry, recording=name, note="; ".join(_describe_gaps(recording)))


def _describe_gaps(recording: Recording) -> Iterator[str]:
    if recording.result is None:
        yield NO_RESULT.message
    if recording.torn_bytes:
        yield f"a torn tail of {recording.torn_bytes} bytes was not read"
    if recording.damage:
        yield f"built from the records before the damage: {recording.damage}"


def _find_superseded(paths: list[Path]) -> set[Path]:
    """Return the recordings of sessions with a later attempt in the same folder."""
    latest: dict[tuple[Path, str], tuple[int, Path]] = {}
    for path in paths:
        session, epoch = parse_name(path)
        key = (path.parent, session)
        latest[key] = max(latest.get(key, (epoch, path)), (epoch, path))
    return set(paths) - {path for _, path in latest.values()}
