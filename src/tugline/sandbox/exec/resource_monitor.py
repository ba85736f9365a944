"""A box's share of disk and memory: watched while a program runs, told when it has ended.

The disk is watched, not walled: the box's own folders are summed up, with what its processes hold
of files that no walk of these finds (see `held`), and a box that is over its share is ended. Small
boxes are looked at each second, those of very many files at least each `_REST_S` and the time that
the look takes. What was there before the first program is not its doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tugline import log
from tugline.errors import SandboxError
from tugline.sandbox.base import Exit
from tugline.sandbox.exec.limits import Kills
from tugline.sandbox.exec.open_file_usage import held
from tugline.sandbox.exec.runner import KILLED, Gone
from tugline.types import Cause

_WATCH_S = 1.0
_SHARE, _REST_S = 20, 5.0
"""A look that took long is followed by a rest so many times as long, but not longer than this."""
_SMALLEST = 1024
"""Bytes that a file counts at least: a million empty ones fill a disk, too."""
_TOO_DEEP = 1 << 62
_MOST_FORCED = 20
_WATCHERS = ThreadPoolExecutor(4, thread_name_prefix="tugline-watch")
"""Threads of their own, so that nothing else waits for one that sums up a disk."""
_log = log.get("runtimes")


class ResourceMonitor:
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
        self._before: int | None = None
        """Bytes that were there before its first program: a copy of its workspace, say."""
        self._rested = 0.0
        """When the last look and its rest are over."""
        self.over = False
        """Whether it took more of the disk than it may; so it stays."""

    async def run(self, program: Callable[[], Awaitable[Exit]], pid: int) -> Exit:
        """Run a program of the box whose process 1 is `pid`, with the cause of its end.

        Raises `Gone` when the box ended for another reason than its share, and `SandboxError` when
        the node had no memory left.
        """
        if self._before is None:
            loop = asyncio.get_running_loop()
            self._before = await loop.run_in_executor(_WATCHERS, self._beginning)
        began, killed = time.monotonic(), self._kills()
        watch = asyncio.create_task(self._watch(pid))
        gone = None
        try:
            end = await program()
        except Gone as error:
            gone, end = error, Exit(KILLED, timed_out=False, seconds=time.monotonic() - began)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        cause = await self._cause(end, killed)
        if gone is not None and cause is None:
            raise gone
        return msgspec.structs.replace(end, cause=cause)

    async def _watch(self, pid: int) -> None:
        root = Path(f"/proc/{pid}/root")
        await asyncio.sleep(_WATCH_S)
        while True:
            if await self._look(root):
                try:
                    await self._kill()
                except SandboxError as error:
                    _log.warning("box over its disk not ended", error=str(error))
                else:
                    return
            await asyncio.sleep(max(_WATCH_S, self._rested - time.monotonic()))

    async def _look(self, root: Path | None) -> bool:
        """Whether it has ever taken more than it may."""
        began, loop = time.monotonic(), asyncio.get_running_loop()
        if not self.over and await loop.run_in_executor(_WATCHERS, self._too_much, root):
            self.over = True
        now = time.monotonic()
        self._rested = now + min(_SHARE * (now - began), _REST_S)
        return self.over

    def _too_much(self, root: Path | None) -> bool:
        most = self._most + (self._before or 0)
        return used(self._folders(), root, most) > most

    def _beginning(self) -> int:
        """What is there; nothing that is hidden by its depth counts for the box."""
        found = used(self._folders(), None, _TOO_DEEP)
        return found if found < _TOO_DEEP else 0

    async def _cause(self, end: Exit, killed: Kills) -> Cause | None:
        """Which limit ended a program, if one did.

        A quick one may have filled the disk, so it is looked at, but not in the rest of a look:
        with very many files each `true` would take as long as that.
        """
        if end.code == KILLED or time.monotonic() >= self._rested:
            await self._look(None)
        if self.over:
            return Cause.AGENT_DISK
        if end.code != KILLED or end.timed_out:
            return None
        now = self._kills()
        if now.own == killed.own and now.others > killed.others:
            msg = "the node is out of memory: the kernel ended a program that was within its limit"
            raise SandboxError(msg)
        return Cause.AGENT_MEMORY if now.own > killed.own else None


def used(folders: Iterable[Path], root: Path | None, most: int) -> int:
    """Bytes in a box's own folders, and in hidden files that its processes hold; until `most`.

    `root` is the box's file system as seen from here, with its ``proc``.
    """
    total = 0
    tops = [os.path.realpath(folder) for folder in folders]
    for size in _sizes(tops, set(), tuple(f"{top}/" for top in tops)):
        total += size
        if total > most:
            return total
    return total + (held(root) if root else 0)


def _sizes(
    folders: Iterable[str], links: set[int], within: tuple[str, ...], forced: tuple[str, ...] = ()
) -> Iterator[int]:
    """Of all that is in the folders; each hard link that was seen is added to `links`.

    Those `within` the box that forbid to be listed are opened for that; these here are in `forced`.
    """
    stack = list(folders)
    while stack:
        folder = stack.pop()
        try:
            yield from _listed(folder, stack, links)
        except PermissionError:
            if len(forced) > _MOST_FORCED:  # nobody nests so deep but to hide something
                yield _TOO_DEEP
            elif folder not in forced:
                with contextlib.suppress(OSError), _opened(folder, within):
                    yield from _sizes([folder], links, within, (*forced, folder))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # the same
                yield _TOO_DEEP


def _listed(folder: str, stack: list[str], links: set[int]) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # gone meanwhile; the rest is not
                continue
            if stat.S_ISDIR(found.st_mode):
                stack.append(entry.path)
            if found.st_nlink == 1 or found.st_ino not in links:
                links.add(found.st_ino) if found.st_nlink > 1 else None
                yield max(found.st_blocks * 512, _SMALLEST)


@contextlib.contextmanager
def _opened(folder: str, within: tuple[str, ...]) -> Iterator[None]:
    """A folder of ours that may be listed for as long as this takes, whatever its mode."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        place = Path(f"/proc/self/fd/{handle}")
        if not f"{place.readlink()}/".startswith(within):  # a link led out
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        place.chmod(mode | stat.S_IRWXU)
        try:
            yield
        finally:
            if stat.S_IMODE(os.fstat(handle).st_mode) == mode | stat.S_IRWXU:
                place.chmod(mode)
    finally:
        os.close(handle)
