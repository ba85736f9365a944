"""The disk of a node: what a dead predecessor left, how long sessions stay, and when it is full.

Folders of sessions (``<session>.<epoch>``) and recordings stay after their commit, so that somebody
can look at them, but not for ever: too old, too much in all, or too little free space, and the
oldest go. What is still needed (running, or not committed) is never touched. A folder without the
mark of a committed session is an orphan: its programs are ended and it is removed at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from tugline import log
from tugline.errors import UsageError
from tugline.node.settings import NodeSettings
from tugline.node.stats import Stats
from tugline.plugins import list_names
from tugline.rollout.parts import Parts
from tugline.sandbox.files import remove
from tugline.types import PluginSpec

EVERY_S = 60.0
LOW_EVERY_S = 5.0
"""How often a disk that is nearly full is looked at."""
DONE = ".done"
"""Marks the folder of a session that is committed."""
_GB = 1 << 30
_log = log.get("node.disk")


class _Item(NamedTuple):
    """Something that may be removed."""

    changed: float
    size: int
    path: Path


class Housekeeping:
    """Keeps `sessions` and `recordings` within their bounds."""

    def __init__(
        self,
        sessions: Path,
        recordings: Path | None,
        settings: NodeSettings,
        stats: Stats,
        is_needed: Callable[[str], bool],
    ) -> None:
        """`is_needed` says whether a name ``<session>.<epoch>`` is one to be left alone."""
        self._sessions, self._recordings = sessions, recordings
        self._settings, self._stats, self._is_needed = settings, stats, is_needed
        self._sizes: dict[str, int] = {}
        """Of folders that do not change any more."""

    def reap(self, parts: Parts, kept: Collection[str]) -> int:
        """End what a dead node left running, remove the folders of sessions it had not finished.

        `kept` are the names of those whose results are in the journal.
        """
        self._sessions.mkdir(parents=True, exist_ok=True)
        # Committed ones have nothing that runs, and may be too many to be looked through.
        left = [one for one in self._sessions.iterdir() if not (one / DONE).exists()]
        ended = sum(_reap(parts, name, left) for name in list_names("runtime"))
        for folder in left:
            if folder.name not in kept:
                _remove(folder)
        if left:
            _log.warning("reaped", programs=ended, folders=len(left))
        return ended

    async def run(self) -> None:
        """Look after the disk for as long as the node lives."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except OSError as error:  # a folder that went meanwhile, a disk that is ill
                _log.warning("disk not looked through", error=str(error))
            await asyncio.sleep(LOW_EVERY_S if self._stats.disk_low else EVERY_S)

    def sweep(self) -> None:
        """Remove what is too old or too much, oldest first. Blocks."""
        items = sorted(self._items())
        total = sum(item.size for item in items)
        for item in items:
            aged = time.time() - item.changed > self._settings.keep_s
            if not (aged or total > self._settings.quota_gb * _GB or self._is_low()):
                break
            _remove(item.path)
            self._sizes.pop(item.path.name, None)
            total -= item.size
        self._stats.disk_bytes = total
        low = self._is_low()
        if low is not self._stats.disk_low:
            self._stats.disk_low = low
            say = "disk nearly full: no new sessions" if low else "disk has room again"
            _log.error(say, folder=str(self._sessions), floor_gb=self._settings.disk_floor_gb)

    def _is_low(self) -> bool:
        return shutil.disk_usage(self._sessions).free < self._settings.disk_floor_gb * _GB

    def _items(self) -> list[_Item]:
        found = []
        for folder in self._sessions.iterdir():
            if (folder / DONE).exists() and not self._is_needed(folder.name):
                if folder.name not in self._sizes:
                    self._sizes[folder.name] = _size(folder)
                size = self._sizes[folder.name]
                found.append(_Item((folder / DONE).stat().st_mtime, size, folder))
        for recording in self._recordings.glob("*.rec") if self._recordings else ():
            if not self._is_needed(recording.stem):
                stat = recording.stat()
                found.append(_Item(stat.st_mtime, stat.st_size, recording))
        return found


def _reap(parts: Parts, runtime: str, folders: Sequence[Path]) -> int:
    try:
        return sum(map(parts.runtime(PluginSpec(runtime)).reap, folders))
    except UsageError as error:  # not to be had on this machine
        _log.info("runtime not reaped", runtime=runtime, error=str(error))
        return 0


def _size(folder: Path) -> int:
    return sum(
        os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118 - much quicker for many files
        for root, _, names in os.walk(folder)
        for name in names
    )


def _remove(path: Path) -> None:
    """Also what an agent made so deep, or of such a mode, that plain removing fails."""
    with contextlib.suppress(OSError):
        remove(path.parent, path.name)
