"""A box's share of disk and memory: watched while a program runs, told when it has ended.

The disk is watched, not walled: each second the box's own folders are summed up, with what its
processes hold open of deleted files, and a box that is over its share is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tugline.errors import RuntimeFault
from tugline.runtimes.base import Exit
from tugline.runtimes.programs.limits import Kills
from tugline.runtimes.programs.runner import KILLED, Gone
from tugline.types import Cause

_WATCH_S = 1.0
_SHARE = 20
"""The watch takes no more than a twentieth of a processor."""
_SMALLEST = 1024
"""Bytes that a file counts at least: a million empty ones fill a disk, too."""
_WATCHERS = ThreadPoolExecutor(2, thread_name_prefix="tugline-watch")
"""Threads of their own, so that nothing else waits for one that sums up a disk."""


class Share:
    """What one box may take.

    `folders` are its own ones on this machine, `kills` says how many of its processes the kernel
    has ended so far, and `kill` ends all of it.
    """

    def __init__(
        self,
        disk_mb: int,
        folders: Callable[[], Iterable[Path]],
        kills: Callable[[], Kills],
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self._most = disk_mb << 20
        self._folders, self._kills, self._kill = folders, kills, kill
        self.over = False
        """Whether it took more of the disk than it may; so it stays."""

    async def run(self, program: Awaitable[Exit], pid: int) -> Exit:
        """Wait for a program of the box whose process 1 is `pid`, with the cause of its end.

        Raises `Gone` when the box ended for another reason than its share, and `RuntimeFault` when
        the node had no memory left.
        """
        began, killed = time.monotonic(), self._kills()
        watch = asyncio.create_task(self._watch(pid))
        gone = None
        try:
            end = await program
        except Gone as error:
            gone, end = error, Exit(KILLED, timed_out=False, seconds=time.monotonic() - began)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        cause = await asyncio.to_thread(self._cause, end, killed)
        if gone is not None and cause is None:
            raise gone
        return msgspec.structs.replace(end, cause=cause)

    async def _watch(self, pid: int) -> None:
        loop, root = asyncio.get_running_loop(), Path(f"/proc/{pid}/root")
        while True:
            await asyncio.sleep(_WATCH_S)
            began = time.monotonic()
            if await loop.run_in_executor(_WATCHERS, self._too_much, root):
                self.over = True
                await self._kill()
                return
            await asyncio.sleep(_SHARE * (time.monotonic() - began))

    def _too_much(self, root: Path | None) -> bool:
        return used(self._folders(), root, self._most) > self._most

    def _cause(self, end: Exit, killed: Kills) -> Cause | None:
        """Which limit ended a program, if one did."""
        self.over = self.over or self._too_much(None)
        if self.over:
            return Cause.AGENT_DISK
        if end.code != KILLED or end.timed_out:
            return None
        now = self._kills()
        if now.own == killed.own and now.others > killed.others:
            msg = "the node is out of memory: the kernel ended a program that was within its limit"
            raise RuntimeFault(msg)
        return Cause.AGENT_MEMORY if now.own > killed.own else None


def used(folders: Iterable[Path], root: Path | None, most: int) -> int:
    """Bytes in a box's own folders, and in deleted files that its processes hold; until `most`.

    `root` is the box's file system as seen from here, with its ``proc``.
    """
    total = 0
    for size in _sizes(folders):
        total += size
        if total > most:
            return total
    return total + sum(_deleted(root).values() if root else ())


def _sizes(folders: Iterable[Path]) -> Iterator[int]:
    stack = [os.fspath(folder) for folder in folders]
    links: set[int] = set()
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    found = entry.stat(follow_symlinks=False)
                    if found.st_nlink == 1 or found.st_ino not in links:
                        links.add(found.st_ino) if found.st_nlink > 1 else None
                        yield max(found.st_blocks * 512, _SMALLEST)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # nobody nests so deep but to hide something
                yield 1 << 62


def _deleted(root: Path) -> Mapping[tuple[int, int], int]:
    sizes: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError), os.scandir(root / "proc") as processes:
        for process in processes:
            if process.name.isdecimal():
                with contextlib.suppress(OSError), os.scandir(f"{process.path}/fd") as entries:
                    for one in entries:
                        found = one.stat()
                        if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
                            sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sizes
