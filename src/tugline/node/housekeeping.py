"""A node's disk: its journal of results, orphans of a dead predecessor, retention, a full disk.

Folders of sessions (``<session>.<epoch>``) and recordings stay after their commit for inspection,
until they are too old, too large in total, or free space is low; then the oldest are removed. A
session that runs or is not committed is never touched. At the start, a folder without the mark of a
committed session is an orphan: its programs are ended and it is removed.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tugline import log
from tugline.atomic import write_file
from tugline.errors import UsageError
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import Stats
from tugline.plugins import list_names
from tugline.rollout.parts import Parts
from tugline.sandbox.files import remove
from tugline.sandbox.resource_monitor import folder_bytes
from tugline.types import PluginSpec

_INTERVAL_S, _LOW_INTERVAL_S = 60.0, 5.0
"""Between sweeps, and while the disk is nearly full."""
COMMITTED = ".done"
"""File that marks the folder of a session that is committed, or that others have."""
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
    """Says whether ``<session>.<epoch>`` must stay."""
    read_free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    _sizes: dict[str, int] = field(default_factory=dict)
    """Of committed sessions, whose folders do not change any more."""

    def reap(self, parts: Parts, journaled: Collection[str]) -> int:
        """End the programs of a dead node and remove its folders; returns the number ended.

        The folders of sessions in `journaled` stay.
        """
        self.sessions.mkdir(parents=True, exist_ok=True)
        # Committed ones have no programs, and may be too many to inspect.
        orphans = [one for one in self.sessions.iterdir() if not (one / COMMITTED).exists()]
        ended = sum(_reap(parts, name, orphans) for name in list_names("runtime"))
        for folder in orphans:
            if folder.name not in journaled:
                _remove(folder)
        if orphans:
            _log.warning("reaped", programs=ended, folders=len(orphans))
        return ended

    async def run(self) -> None:
        """Sweep for as long as the node runs."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except OSError as error:  # a folder that vanished meanwhile, a failing disk
                _log.warning("sweep failed", error=str(error))
            await asyncio.sleep(_LOW_INTERVAL_S if self.stats.disk_low else _INTERVAL_S)

    def sweep(self) -> None:
        """Remove what is too old or too much, oldest first. Blocks."""
        candidates = sorted(self._list_candidates())
        total = sum(size for _, size, _ in candidates)
        for changed, size, path in candidates:
            expired = time.time() - changed > self.settings.keep_s
            if not (expired or total > self.settings.quota_gb * _GB or self._is_low()):
                break
            _remove(path)
            self._sizes.pop(path.name, None)
            total -= size
        self.stats.disk_bytes = total
        low = self._is_low()
        if low is not self.stats.disk_low:
            self.stats.disk_low = low
            event = "disk nearly full: no new sessions" if low else "disk has room again"
            _log.error(event, folder=str(self.sessions), floor_gb=self.settings.disk_floor_gb)

    def _is_low(self) -> bool:
        return self.read_free_bytes(self.sessions) < self.settings.disk_floor_gb * _GB

    def _list_candidates(self) -> list[tuple[float, int, Path]]:
        """Time of the last change, size and path of each folder or recording that may go."""
        candidates = []
        for folder in self.sessions.iterdir():
            if (folder / COMMITTED).exists() and not self.is_needed(folder.name):
                if folder.name not in self._sizes:
                    self._sizes[folder.name] = folder_bytes(folder)
                changed = (folder / COMMITTED).stat().st_mtime
                candidates.append((changed, self._sizes[folder.name], folder))
        for recording in self.recordings.glob("*.rec") if self.recordings else ():
            if not self.is_needed(recording.stem):
                stat = recording.stat()
                candidates.append((stat.st_mtime, stat.st_size, recording))
        return candidates


def _reap(parts: Parts, runtime: str, folders: Sequence[Path]) -> int:
    try:
        return sum(map(parts.runtime(PluginSpec(runtime)).reap, folders))
    except UsageError as error:  # not available on this machine
        _log.info("runtime not reaped", runtime=runtime, error=str(error))
        return 0


def _remove(path: Path) -> None:
    """Remove what an agent may have made so deep, or with such a mode, that rmtree fails."""
    with contextlib.suppress(OSError):
        remove(path.parent, path.name)


# --------------------------------------------------------------------------- journal
class Journal:
    """Results that are not committed yet, one file each, safe from the death of this process (I3).

    A result is written before it is offered to the server, and removed when the server has it. What
    a killed node left is offered by the next one in the same folder. Its name is
    ``<session>.<epoch>``, so a result whose lease was lost meanwhile is fenced as usual.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list_pending(self) -> list[str]:
        """Names of the results in the folder; half-written ones are removed."""
        for part in self._folder.glob("*.part"):
            part.unlink(missing_ok=True)
        names = (path.stem for path in sorted(self._folder.glob("*.result")))
        return [name for name in names if name.rpartition(".")[2].isdecimal()]

    def contains(self, name: str) -> bool:
        """Whether a result is in the folder."""
        return self._path(name).exists()

    async def write(self, name: str, data: bytes) -> None:
        """Write a result. If the disk refuses, it is in memory only, which is logged."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_file, self._path(name), data)
        except OSError as error:
            _log.error("result not journaled", result=name, error=str(error))

    async def read(self, name: str) -> bytes:
        """A result that was written. Raises `OSError`."""
        return await asyncio.to_thread(self._path(name).read_bytes)

    def remove(self, name: str) -> None:
        """Remove a result that is committed or fenced. Blocks."""
        self._path(name).unlink(missing_ok=True)

    def set_aside(self, name: str) -> None:
        """Rename a result that the server refused, for inspection. Blocks."""
        path = self._path(name)
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".refused"))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.result"
