"""Disk of a node: journal of results, cleanup after a dead process, retention, low disk space.

Folders of sessions (``<session>.<epoch>``) and recordings are kept after the commit for inspection,
until they are too old, too large in total, or free space is low; then the oldest are removed. The
files of a running or uncommitted session are never removed. At the start, a folder without the mark
of a committed session is an orphan: its programs are ended and it is removed.
"""

import asyncio
import contextlib
import heapq
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tugline import log
from tugline.atomic import write_file
from tugline.errors import UsageError
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import Stats
from tugline.plugins import list_names
from tugline.recording.folder import PATCH
from tugline.rollout.parts import Parts
from tugline.sandbox.files import remove
from tugline.sandbox.resource_monitor import folder_bytes
from tugline.types import PluginSpec

_INTERVAL_S = 60.0
"""Seconds between sweeps."""
_LOW_INTERVAL_S = 5.0
"""Seconds between sweeps while free space is low."""
COMMITTED = ".done"
"""Marker file in the folder of a session that is committed or held by another node."""
_BATCH = 256
"""Number of the oldest files that are listed at once."""
_GB = 1 << 30
_log = log.get("node.disk")


@dataclass(eq=False)
class Housekeeping:
    """Keeps `sessions` and `recordings` within the limits of `settings`."""

    sessions: Path
    recordings: Path | None
    settings: NodeSettings
    stats: Stats
    is_needed: Callable[[str], bool]
    """Returns whether ``<session>.<epoch>`` must be kept."""
    read_free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    _total: int = 0
    """Size of all removable files, as far as they are counted."""
    _sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the folders of committed sessions, which do not change any more."""

    def reap(self, parts: Parts, journaled: Collection[str]) -> int:
        """End the programs of a dead process and remove its folders; return the number ended.

        The folders of sessions in `journaled` are kept.
        """
        self.sessions.mkdir(parents=True, exist_ok=True)
        # Committed sessions have no programs, and may be too many to inspect.
        orphans = [path for path in self.sessions.iterdir() if not (path / COMMITTED).exists()]
        ended = sum(_reap(parts, name, orphans) for name in list_names("runtime"))
        for folder in orphans:
            if folder.name not in journaled:
                _remove(folder)
        if orphans:
            _log.warning("reaped", programs=ended, folders=len(orphans))
        return ended

    async def run(self) -> None:
        """Sweep repeatedly until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except OSError as error:  # a folder was removed meanwhile, or the disk fails
                _log.warning("sweep failed", error=str(error))
            await asyncio.sleep(_LOW_INTERVAL_S if self.stats.disk_low else _INTERVAL_S)

    def sweep(self) -> None:
        """Remove the oldest files beyond the limits and update the statistics. Blocks."""
        removed = 1
        while removed:
            self._total = 0
            removed = self._remove_some(heapq.nsmallest(_BATCH, self._list_candidates()))
        self.stats.disk_bytes = self._total
        low = self._is_low()
        if low is not self.stats.disk_low:
            self.stats.disk_low = low
            event = "disk nearly full: no new sessions" if low else "disk has room again"
            _log.error(event, folder=str(self.sessions), floor_gb=self.settings.disk_floor_gb)

    def _remove_some(self, oldest: Sequence[tuple[float, int, str]]) -> int:
        """Remove the first of these files, as far as the limits require; return how many."""
        removed = 0
        for changed, size, name in oldest:
            path = Path(name)
            expired = time.time() - changed > self.settings.keep_s
            if not (expired or self._total > self.settings.quota_gb * _GB or self._is_low()):
                break
            _remove(path)
            if not path.exists():
                removed += 1
                self._sizes.pop(path.name, None)
                self._total -= size
        return removed

    def _is_low(self) -> bool:
        return self.read_free_bytes(self.sessions) < self.settings.disk_floor_gb * _GB

    def _list_candidates(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of last change, size, path) of all removable folders, recordings, patches.

        Adds their sizes to the total. They may be a hundred thousand, so no list is made of them.
        """
        with os.scandir(self.sessions) as folders:
            for folder in folders:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    changed = os.stat(f"{folder.path}/{COMMITTED}").st_mtime  # noqa: PTH116
                    if not self.is_needed(folder.name):
                        yield self._count(changed, self._measure(folder.name), folder.path)
        if self.recordings is None or not self.recordings.exists():
            return
        with os.scandir(self.recordings) as recordings:
            for recording in recordings:
                stem, suffix = os.path.splitext(recording.name)  # noqa: PTH122
                is_old = suffix == ".rec" and not self.is_needed(stem)
                if is_old or recording.name.startswith(PATCH):  # a patch is as new as its last use
                    stat = recording.stat()
                    yield self._count(stat.st_mtime, stat.st_size, recording.path)

    def _measure(self, name: str) -> int:
        """Return the size of the folder of a session, which is measured once."""
        if name not in self._sizes:
            self._sizes[name] = folder_bytes(self.sessions / name)
        return self._sizes[name]

    def _count(self, changed: float, size: int, path: str) -> tuple[float, int, str]:
        self._total += size
        return changed, size, path


def _reap(parts: Parts, runtime: str, folders: Sequence[Path]) -> int:
    try:
        return sum(map(parts.runtime(PluginSpec(runtime)).reap, folders))
    except UsageError as error:  # not available on this machine
        _log.info("runtime not reaped", runtime=runtime, error=str(error))
        return 0


def _remove(path: Path) -> None:
    """Remove a file or folder, whose depth or modes may be such that rmtree fails."""
    with contextlib.suppress(OSError):
        remove(path.parent, path.name)


# --------------------------------------------------------------------------- journal
class Journal:
    """Results that are not committed yet, one file each, which survive this process (I3).

    A result is written before it is offered to the server, and removed when the server has it.
    After a node was killed, the next node with the same folder offers its results. Names are
    ``<session>.<epoch>``, so a result whose lease was lost meanwhile is fenced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_pending(self) -> list[str]:
        """Return the names of the results in the folder; remove partly written ones."""
        for part in self._folder.glob("*.part"):
            part.unlink(missing_ok=True)
        names = (path.stem for path in sorted(self._folder.glob("*.result")))
        return [name for name in names if name.rpartition(".")[2].isdecimal()]

    def contains(self, name: str) -> bool:
        """Return whether a result is in the folder."""
        return self._path(name).exists()

    async def write(self, name: str, data: bytes) -> None:
        """Write a result. On an error of the disk, only log it: the result is in memory."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_file, self._path(name), data)
        except OSError as error:
            _log.error("result not journaled", result=name, error=str(error))

    async def read(self, name: str) -> bytes:
        """Return a result. Raises `OSError`."""
        return await asyncio.to_thread(self._path(name).read_bytes)

    def remove(self, name: str) -> None:
        """Remove a result that is committed or fenced. Blocks."""
        self._path(name).unlink(missing_ok=True)

    def set_aside(self, name: str, folder: Path) -> None:
        """Move a result that the server refused to `folder`, for inspection. Blocks.

        There it is removed with the session's other files; without the folder, at once.
        """
        with contextlib.suppress(OSError):
            self._path(name).replace(folder / "result.refused")
        self.remove(name)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.result"
