"""Trajectory and result files: write, read, and rebuild them from recordings alone.

A trajectory file holds one `Trajectory`: msgpack in one zstd frame, the same bytes for equal
trajectories. ``index.json`` beside the files names each with its digest, so that a damaged or
missing file is an error and not a smaller batch (I2). A rebuilt outcome is taken from the recorded
result, never from a clock, so equal recordings and builders give equal bytes. One session is in
memory at a time.
"""

import filecmp
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec
import zstandard

from tugline.atomic import append_line, read_whole_lines, write_file
from tugline.errors import CaptureError, UsageError
from tugline.protocol import ResultView
from tugline.recording.file import Recording
from tugline.recording.file import read as read_recording
from tugline.recording.folder import parse_name
from tugline.recording.records import RecordedResult
from tugline.schema import copy_fields
from tugline.traces.base import make_builder
from tugline.types import Boundary, Failure, Ledger, PluginSpec, Status, Trajectory, decode, encode

INDEX = "index.json"
RESULTS = "results.jsonl"
TRAJECTORIES = "trajectories"


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A session and its trajectory file."""

    session: str
    recording: str = ""
    """Path of the recording, relative to the folder that was read."""
    file: str = ""
    """Path of the trajectory file, relative to the index; empty if there is none."""
    sha256: str = ""
    """Digest of the file in hex."""
    traces: int = 0
    tokens: int = 0
    """Number of tokens in all traces, context included."""
    ledger: Ledger = Ledger()
    note: str = ""
    """Irregularities such as a torn tail or a missing result."""
    error: str = ""
    """Reason why there is no file."""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a folder of trajectories, in the order of the recordings."""

    builder: PluginSpec | None
    """Builder of all trajectories; None if each session's own was used."""
    entries: tuple[IndexEntry, ...]


def pack(trajectory: Trajectory) -> bytes:
    """Encode a trajectory as the bytes of its file."""
    return zstandard.ZstdCompressor(level=3).compress(encode(trajectory))


def unpack(data: bytes) -> Trajectory:
    """Decode the bytes of a file. Raises `ZstdError` or `msgspec.DecodeError`."""
    return decode(zstandard.ZstdDecompressor().decompress(data), Trajectory)


def describe(trajectory: Trajectory, file: str, data: bytes) -> IndexEntry:
    """Return the index entry of a trajectory whose file holds `data`."""
    return copy_fields(
        IndexEntry,
        trajectory,
        file=file,
        sha256=hashlib.sha256(data).hexdigest(),
        traces=len(trajectory.traces),
        tokens=sum(len(trace.ids) for trace in trajectory.traces),
    )


def read(path: Path, sha256: str = "") -> Trajectory:
    """Read a trajectory file and check its digest, if given.

    Raises `CaptureError` naming the file.
    """
    try:
        data = path.read_bytes()
        if sha256 and hashlib.sha256(data).hexdigest() != sha256:
            raise CaptureError(f"{path} differs from {INDEX}: its SHA-256 is another")
        return unpack(data)
    except OSError as error:
        raise CaptureError(f"cannot read trajectory {path}: {error.strerror}") from error
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise CaptureError(f"{path} is not a trajectory file: {error}") from error


def read_index(folder: Path) -> Index:
    """Read the index of a folder of trajectories. Raises `UsageError` if it has none."""
    try:
        return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{folder} has no {INDEX} of trajectories: {error}") from error


def read_folder(folder: Path) -> Iterator[Trajectory]:
    """Yield every trajectory in the folder's index, one at a time, with its digest checked.

    Raises `UsageError` for a folder without index, `CaptureError` for a missing or altered file.
    """
    for entry in read_index(folder).entries:
        if entry.file:
            yield read(folder / entry.file, entry.sha256)


def read_results(path: Path) -> list[ResultView]:
    """Read the results of a run from its folder or its ``results.jsonl``. Raises `UsageError`."""
    file = path / RESULTS if path.is_dir() else path
    try:
        return list(_decode_results(file.read_bytes().splitlines()).values())
    except (OSError, msgspec.DecodeError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
        msg = f"{file} is not a file of results of `tugline run`, `eval` or `results --json`"
        raise UsageError(f"{msg}: {reason}") from error


def _decode_results(lines: Iterable[bytes]) -> dict[str, ResultView]:
    """Decode the last result of each session, in the order of these lines."""
    views: dict[str, ResultView] = {}
    for line in lines:
        view = msgspec.json.decode(line, type=ResultView)
        views.pop(view.session, None)
        views[view.session] = view
    return views


class ResultFolder:
    """Results of a run: one line of ``results.jsonl`` each, trajectories in ``trajectories/``.

    A result is saved once its line is on the disk; the line is written after the trajectory. If
    the process dies in between, or a line is torn, the result is saved again (I3). All methods
    block on the disk.
    """

    def __init__(self, folder: Path) -> None:
        """Create or open `folder`. Raises `OSError` if it cannot be used."""
        self._folder = folder
        self._lines = folder / RESULTS
        (folder / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        lines = read_whole_lines(self._lines)
        self.views = _decode_results(lines)
        """Results by session, in the order in which they were saved."""
        self._has_revised = len(lines) > len(self.views)

    def add(self, view: ResultView, packed: bytes) -> None:
        """Save a result and its packed trajectory (empty for none), unless saved before.

        A later revision replaces a saved result; `write_index` removes the replaced line.
        """
        known = self.views.get(view.session)
        if known is not None and known.revision >= view.revision:
            return
        if packed:
            write_file(self.path(view.session), packed)
        append_line(self._lines, msgspec.json.encode(view))
        self._has_revised |= self.views.pop(view.session, None) is not None
        self.views[view.session] = view

    def forget(self, sessions: Collection[str]) -> None:
        """Remove results that are replaced by later ones."""
        if not self.views.keys() & sessions:
            return
        for session in sessions:
            self.views.pop(session, None)
        self._write_lines()

    def _write_lines(self) -> None:
        lines = [msgspec.json.encode(view) + b"\n" for view in self.views.values()]
        write_file(self._lines, b"".join(lines))
        self._has_revised = False

    def path(self, session: str) -> Path:
        """Return the path of a session's trajectory."""
        return self._folder / TRAJECTORIES / f"{session}.traj"

    def write_index(self) -> Path:
        """Write the index for `read_folder`; return the folder of trajectories."""
        if self._has_revised:
            self._write_lines()
        folder = self._folder / TRAJECTORIES
        entries = tuple(self._make_entry(view) for view in self.views.values())
        write_file(folder / INDEX, msgspec.json.encode(Index(builder=None, entries=entries)))
        return folder

    def _make_entry(self, view: ResultView) -> IndexEntry:
        if not view.bytes:
            return IndexEntry(session=view.session, error=f"the session was {view.status}")
        path = self.path(view.session)
        return describe(read(path), path.name, path.read_bytes())


# --------------------------------------------------------------------------- rebuilding
NO_RESULT = RecordedResult(
    status=Status.FAILED,
    builder="",
    ledger=Ledger(),
    failure=Failure(Boundary.INFRASTRUCTURE, "no result is recorded: the session did not end"),
)


def rebuild(recording: Recording, spec: PluginSpec | None = None) -> Trajectory:
    """Build the trajectory of a session with the builder of `spec`, by default its task's own.

    A session without a recorded result counts as failed, so that no trainer uses it. Rewards per
    trace are omitted with another builder, which makes other traces. Raises `CaptureError` on an
    incomplete call or recording, `UsageError` on an unknown builder.
    """
    header = recording.header
    result = recording.result or NO_RESULT
    if header is None:
        raise CaptureError("the recording has no header, so its session is unknown")
    own = header.task.builder
    traces, ledger, _ = make_builder(spec or own).build(recording.calls)
    reward = result.reward
    if reward is not None and spec not in (None, own):
        reward = msgspec.structs.replace(reward, per_trace=())
    return copy_fields(
        Trajectory,
        result,
        session=header.session.id,
        task=header.task.id,
        sample=header.session.sample,
        traces=traces,
        ledger=ledger,
        reward=reward,
        harness=header.task.harness.name,
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

    `spec` is the builder for all sessions; None uses each session's own. Only the last attempt at
    a session counts. A recording that cannot be read or built has an entry with the error.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} must be a new or an empty folder")
    if spec is not None:
        make_builder(spec)
    superseded = find_superseded(paths)
    entries = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        session, _ = parse_name(path)
        if path in superseded:
            entry = IndexEntry(
                session=session, recording=name, note="superseded by another attempt or copy"
            )
        else:
            file = Path(name).with_name(f"{session}.traj")
            entry = _rebuild_one(path, name, out, file, spec, salvage=salvage)
        entries.append(entry)
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
        recording = read_recording(path, salvage=salvage)
        trajectory = rebuild(recording, spec)
    except (CaptureError, UsageError) as error:
        return IndexEntry(session=file.stem, recording=name, error=str(error))
    data = pack(trajectory)
    target = out / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    entry = describe(trajectory, file.as_posix(), data)
    return msgspec.structs.replace(entry, recording=name, note="; ".join(recording.describe_gaps()))


def find_superseded(paths: Iterable[Path]) -> set[Path]:
    """Return recordings with a later attempt in the same folder, and copies of recordings."""
    latest: dict[tuple[Path, str], tuple[int, Path]] = {}
    for path in paths:
        session, epoch = parse_name(path)
        key = (path.parent, session)
        latest[key] = max(latest.get(key, (epoch, path)), (epoch, path))
    counts: dict[tuple[str, int], list[Path]] = {}
    for _, path in latest.values():
        distinct = counts.setdefault((path.name, path.stat().st_size), [])
        if not any(filecmp.cmp(path, other, shallow=False) for other in distinct):
            distinct.append(path)
    return set(paths).difference(*counts.values())
