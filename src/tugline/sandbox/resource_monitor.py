"""Enforce a sandbox's disk limit while a program runs, and say which limit ended the program.

The folders of a sandbox are summed up again and again, with the files that its processes hold open
but that no walk finds (`open_file_usage`), and a sandbox over its limit is killed. A file system of
a fixed size would be cheaper, but an overlay's upper layer must outlive its sandbox and be larger
than memory, and few disks have project quotas. Small sandboxes are scanned each second, those of
very many files with longer pauses. What was there before the first program does
not count.
"""

import asyncio
import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tugline import log
from tugline.errors import SandboxError
from tugline.sandbox.base import Exit, run_beside
from tugline.sandbox.limits import OomKills
from tugline.sandbox.runner import KILLED, SandboxEnded
from tugline.types import Cause

T = TypeVar("T")

_PAUSE_FACTOR = 20
"""Pause after a scan, as a multiple of its duration."""
_MIN_FILE_BYTES = 1024
"""What a file counts at least: a million empty ones fill a disk, too."""
_UNBOUNDED = 1 << 62
"""The size of what cannot be measured and is only made to hide something."""
_MAX_LOCKED_FOLDERS = 20
_MAX_HELD_FILES = 1 << 20
_LOOKUPS = 3
_SCANNERS = ThreadPoolExecutor(4, thread_name_prefix="tugline-disk")
"""Threads of their own, so that nothing else waits for a scan."""
_log = log.get("sandbox")


def disk_usage(folders: Iterable[Path], root: Path | None, stop_at: int) -> int:
    """Bytes in a sandbox's own folders and in hidden files that its processes hold open.

    Stops once it is over `stop_at`. `root` is the sandbox's file system as seen from here, with its
    ``proc``; without one no processes are looked at.
    """
    total = 0
    tops = [os.path.realpath(folder) for folder in folders]
    for size in _sizes(tops, set(), tuple(f"{top}/" for top in tops)):
        total += size
        if total > stop_at:
            return total
    return total + (open_file_usage(root) if root else 0)


@dataclass
class ResourceMonitor:
    """Limits one sandbox. The last three fields are for tests."""

    disk_mb: int
    folders: Callable[[], Iterable[Path]]
    """Its own folders on this machine."""
    count_kills: Callable[[], OomKills]
    """Counts its processes that the kernel killed so far."""
    kill: Callable[[], Awaitable[None]]
    """Kills all of them."""
    _: KW_ONLY
    interval_s: float = 1.0
    """Pause after a scan."""
    max_pause_s: float = 5.0
    """The longest pause, after a scan that took long."""
    measure: Callable[[Iterable[Path], Path | None, int], int] = disk_usage
    over_limit: bool = False
    """Whether it has ever used more of the disk than it may."""
    _initial_bytes: int | None = None
    """Bytes before its first program: a copy of its workspace, say."""
    _next_scan: float = 0.0

    async def run(self, program: Callable[[], Awaitable[Exit]], pid: int) -> Exit:
        """Run a program of the sandbox whose process 1 is `pid`; add the cause of its end.

        Raises `SandboxEnded` when the sandbox ended for another reason than its limits, and
        `SandboxError` when the node was out of memory.
        """
        if self._initial_bytes is None:
            self._initial_bytes = await self._in_thread(self._measure_initial)
        began, kills = time.monotonic(), self.count_kills()
        ended = None
        try:
            async with run_beside(self._watch(pid)):
                end = await program()
        except SandboxEnded as error:
            ended = error
            end = Exit(KILLED, timed_out=False, seconds=time.monotonic() - began)
        cause = await self._find_cause(end, kills)
        if ended is not None and cause is None:
            raise ended
        return msgspec.structs.replace(end, cause=cause)

    async def _watch(self, pid: int) -> None:
        root = Path(f"/proc/{pid}/root")
        await asyncio.sleep(self.interval_s)
        while True:
            if await self._scan(root):
                try:
                    await self.kill()
                except SandboxError as error:
                    _log.warning("sandbox over its disk limit not killed", error=str(error))
                else:
                    return
            await asyncio.sleep(max(self.interval_s, self._next_scan - time.monotonic()))

    async def _scan(self, root: Path | None) -> bool:
        """Measure its disk use; return whether it has ever been over the limit."""
        began = time.monotonic()
        if not self.over_limit and await self._in_thread(self._exceeds_limit, root):
            self.over_limit = True
        now = time.monotonic()
        self._next_scan = now + min(_PAUSE_FACTOR * (now - began), self.max_pause_s)
        return self.over_limit

    def _exceeds_limit(self, root: Path | None) -> bool:
        max_bytes = (self.disk_mb << 20) + (self._initial_bytes or 0)
        return self.measure(self.folders(), root, max_bytes) > max_bytes

    def _measure_initial(self) -> int:
        """What is there; what is hidden by its depth does not count in the sandbox's favour."""
        found = self.measure(self.folders(), None, _UNBOUNDED)
        return found if found < _UNBOUNDED else 0

    async def _find_cause(self, end: Exit, before: OomKills) -> Cause | None:
        """Return the limit that ended a program, if one did.

        A quick program may have filled the disk, so it is measured here, too, but not in the pause
        after a scan: with very many files each `true` would take as long as that.
        """
        if end.code == KILLED or time.monotonic() >= self._next_scan:
            await self._scan(None)
        if self.over_limit:
            return Cause.AGENT_DISK
        if end.code != KILLED or end.timed_out:
            return None
        now = self.count_kills()
        if now.own == before.own and now.others > before.others:
            msg = "the node is out of memory: the kernel ended a program that was within its limit"
            raise SandboxError(msg)
        return Cause.AGENT_MEMORY if now.own > before.own else None

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(_SCANNERS, function, *args)


def folder_bytes(folder: Path) -> int:
    """Bytes that a folder takes on disk; 0 for one that is too deep to be measured."""
    found = disk_usage([folder], None, _UNBOUNDED)
    return found if found < _UNBOUNDED else 0


def _sizes(
    folders: Iterable[str], links: set[int], within: tuple[str, ...], unlocked: tuple[str, ...] = ()
) -> Iterator[int]:
    """Yield the sizes of all files below; each hard link that was seen is added to `links`.

    Folders `within` the sandbox that may not be listed are unlocked for the time of the listing;
    `unlocked` are those that are at the moment.
    """
    stack = list(folders)
    while stack:
        folder = stack.pop()
        try:
            yield from _list_sizes(folder, stack, links)
        except PermissionError:
            if len(unlocked) > _MAX_LOCKED_FOLDERS:
                yield _UNBOUNDED
            elif folder not in unlocked:
                with contextlib.suppress(OSError), _unlock(folder, within):
                    yield from _sizes([folder], links, within, (*unlocked, folder))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                yield _UNBOUNDED


def _list_sizes(folder: str, stack: list[str], links: set[int]) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            if stat.S_ISDIR(found.st_mode):
                stack.append(entry.path)
            elif found.st_nlink > 1:
                if found.st_ino in links:
                    continue
                links.add(found.st_ino)
            yield max(found.st_blocks * 512, _MIN_FILE_BYTES)


@contextlib.contextmanager
def _unlock(folder: str, within: tuple[str, ...]) -> Iterator[None]:
    """Let a folder be listed while the block lasts, whatever its mode."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        path = Path(f"/proc/self/fd/{handle}")
        if not f"{path.readlink()}/".startswith(within):  # a link led out
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        path.chmod(mode | stat.S_IRWXU)
        try:
            yield
        finally:
            if stat.S_IMODE(os.fstat(handle).st_mode) == mode | stat.S_IRWXU:
                path.chmod(mode)
    finally:
        os.close(handle)


def open_file_usage(root: Path) -> int:
    """Bytes of files that processes hold and that no walk of their folders finds.

    A file takes space for as long as a process has it open or mapped: deleted, or in folders that
    are renamed all the time or may not be entered. Not seen: a deleted file that exists only in a
    message between two sockets; and, unless this is run by root, one that is only mapped or held by
    a process that may not be inspected.
    """
    sizes: dict[int, int] = {}
    looked_at: set[tuple[int, int]] = set()
    for count, (found, path) in enumerate(_held_files(root)):
        if count == _MAX_HELD_FILES:
            return _UNBOUNDED
        known, is_mapped = (found.st_dev, found.st_ino), "/map_files/" in path
        if known in looked_at or (is_mapped and found.st_nlink > 0):
            continue
        looked_at.add(known)
        if found.st_nlink == 0 or _is_hidden(root, path, found):
            # By number alone: an overlay shows files as those of another disk than they are mapped
            # from.
            size = found.st_blocks * 512
            sizes[found.st_ino] = max(size, sizes.get(found.st_ino, 0))
    return sum(sizes.values())


def _held_files(root: Path) -> Iterator[tuple[os.stat_result, str]]:
    """Yield files that processes have mapped, which only root may look at, and open ones."""
    for process in _numbered(f"{root}/proc"):
        for found, path in _open_files(f"{process}/map_files"):
            if found.st_dev != _anonymous_device():
                yield found, path
        # Each thread may have open files of its own, and the first one may have ended.
        for thread in _numbered(f"{process}/task"):
            yield from _open_files(f"{thread}/fd")


def _numbered(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield entry.path


def _open_files(folder: str) -> Iterator[tuple[os.stat_result, str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                found = entry.stat()
                if stat.S_ISREG(found.st_mode):
                    yield found, entry.path


def _is_hidden(root: Path, path: str, status: os.stat_result) -> bool:
    """Whether an open file is not at its path on disk, as when folders are being renamed."""
    for _ in range(_LOOKUPS):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(f"{root}{os.readlink(path)}"), status):  # noqa: PTH115
                return False
    in_memory = {_anonymous_device()}  # file systems that another limit is for
    with contextlib.suppress(OSError):
        in_memory.add((root / "dev/shm").stat().st_dev)
    return status.st_dev not in in_memory


@functools.cache
def _anonymous_device() -> int:
    """The kernel's file system of shared memory that has no name."""
    handle = os.memfd_create("tugline")
    try:
        return os.fstat(handle).st_dev
    finally:
        os.close(handle)
