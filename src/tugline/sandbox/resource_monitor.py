"""Enforce a sandbox's disk limit while a program runs, and find the limit that ended the program.

The sizes of a sandbox's folders are measured repeatedly, including files that processes hold open
but that no walk finds (`open_file_usage`), and a sandbox over its limit is killed. A file system of
a fixed size would be cheaper, but an overlay's upper layer must outlive its sandbox and may exceed
memory, and few disks have project quotas. Small sandboxes are scanned each second, those with very
many files less often. Files from before the first program do not count.
"""

import asyncio
import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tugline import log
from tugline.aio import PausableTimeout, run_beside
from tugline.errors import SandboxError
from tugline.sandbox.base import Exit, ProgramTimeout
from tugline.sandbox.limits import Cgroup, OomKills, ProcessorWaits
from tugline.sandbox.runner import KILLED, SandboxEnded
from tugline.types import Cause

T = TypeVar("T")

_PAUSE_FACTOR = 20
"""Pause after a scan, as a multiple of its duration."""
_MIN_FILE_BYTES = 1024
"""Minimum size counted for a file: a million empty files fill a disk, too."""
_UNBOUNDED = 1 << 62
"""Size of folders that cannot be measured, which serve only to hide files."""
_WAITS_EVERY_S = 0.5
"""Seconds between two measurements of waits for a processor."""
_MAX_LOCKED_FOLDERS = 20
_MAX_HELD_FILES = 1 << 20
_LOOKUPS = 3
_SCANNERS = ThreadPoolExecutor(4, thread_name_prefix="tugline-disk")
"""Separate threads, so that nothing else waits for a scan."""
_log = log.get("sandbox")


def disk_usage(folders: Iterable[Path], root: Path | None, stop_at: int) -> int:
    """Return the bytes in a sandbox's own folders and in hidden files that processes hold open.

    Stops once over `stop_at`. `root` is a path on the host of the sandbox's file system, including
    its ``proc``; without it, open files are not counted.
    """
    total = 0
    tops = [os.path.realpath(folder) for folder in folders]
    for size in _sizes(tops, set(), tuple(f"{top}/" for top in tops)):
        total += size
        if total > stop_at:
            return total
    return total + (open_file_usage(root) if root else 0)


async def _kill_nothing() -> None:
    """Stand in for the function of a closed sandbox."""


@dataclass
class ResourceMonitor:
    """Enforces the disk limit of one sandbox. Tests set the pauses and `measure`."""

    disk_mb: int
    folders: Callable[[], Iterable[Path]]
    """Returns the sandbox's own folders on this machine."""
    count_kills: Callable[[], OomKills]
    """Counts the sandbox's processes that the kernel has killed so far."""
    kill: Callable[[], Awaitable[None]]
    """Kills all processes of the sandbox."""
    _: KW_ONLY
    interval_s: float = 1.0
    """Minimum pause after a scan, in seconds."""
    max_pause_s: float = 5.0
    """Maximum pause, after a slow scan, in seconds."""
    measure: Callable[[Iterable[Path], Path | None, int], int] = disk_usage
    over_limit: bool = False
    """Whether the sandbox has ever exceeded its limit."""
    _initial_bytes: int | None = None
    """Bytes before the first program, such as a copy of the workspace."""
    _next_scan: float = 0.0

    async def run(self, program: Callable[[], Awaitable[Exit]], pid: int) -> Exit:
        """Run a program in the sandbox whose process 1 is `pid`; set `Exit.cause` at a limit.

        Raises `SandboxEnded` if the sandbox ended for another reason than its limits, and
        `SandboxError` if the node was out of memory.
        """
        if self._initial_bytes is None:
            self._initial_bytes = await self._in_thread(self._measure_initial)
        began = time.monotonic()
        kills = self.count_kills()
        try:
            async with run_beside(self._watch(pid)):
                end = await program()
        except SandboxEnded:
            end = Exit(KILLED, timed_out=False, seconds=time.monotonic() - began)
            cause = await self._find_cause(end, kills)
            if cause is None:
                raise
        else:
            cause = await self._find_cause(end, kills)
        return msgspec.structs.replace(end, cause=cause)

    def close(self) -> None:
        """Drop the sandbox's functions, which refer to the sandbox and so to this monitor."""
        self.folders = list
        self.count_kills = OomKills
        self.kill = _kill_nothing

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
        """Measure the disk use; return whether it has ever exceeded the limit."""
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
        """Return the initial size; 0 if not measurable, so that it does not raise the limit."""
        size = self.measure(self.folders(), None, _UNBOUNDED)
        return size if size < _UNBOUNDED else 0

    async def _find_cause(self, end: Exit, before: OomKills) -> Cause | None:
        """Return the limit that ended a program, if any.

        A short program may have filled the disk, so scan again, except in the pause after a scan:
        with very many files, every short program would take as long as a scan.
        """
        if end.code == KILLED or time.monotonic() >= self._next_scan:
            await self._scan(None)
        if self.over_limit:
            return Cause.AGENT_DISK
        if end.code != KILLED or end.timed_out:
            return None
        now = self.count_kills()
        if now.own == before.own and now.others > before.others:
            msg = "the node is out of memory: the kernel killed a program that was within its limit"
            raise SandboxError(msg)
        return Cause.AGENT_MEMORY if now.own > before.own else None

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(_SCANNERS, function, *args)


@contextlib.asynccontextmanager
async def credit_waits(group: Cgroup, limit: float | PausableTimeout) -> AsyncIterator[None]:
    """Credit a `ProgramTimeout` in the block for the programs' waits for a processor."""
    work = [_credit_waits(group, limit)] if isinstance(limit, ProgramTimeout) else []
    async with run_beside(*work):
        yield


async def _credit_waits(group: Cgroup, limit: ProgramTimeout) -> None:
    waits = await asyncio.to_thread(ProcessorWaits, group)
    while True:
        await asyncio.sleep(min(_WAITS_EVERY_S, limit.limit_s / 8))
        limit.credit(await asyncio.to_thread(waits.measure))


def folder_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on disk; 0 if it is too deep to be measured."""
    size = disk_usage([folder], None, _UNBOUNDED)
    return size if size < _UNBOUNDED else 0


def _sizes(
    folders: Iterable[str], links: set[int], within: tuple[str, ...], unlocked: tuple[str, ...] = ()
) -> Iterator[int]:
    """Yield the sizes of all files below `folders`; `links` collects the inodes of hard links.

    Folders without read permission are unlocked while they are listed, if they are below `within`;
    `unlocked` lists those that are unlocked already.
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
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            if stat.S_ISDIR(status.st_mode):
                stack.append(entry.path)
            elif status.st_nlink > 1:
                if status.st_ino in links:
                    continue
                links.add(status.st_ino)
            yield max(status.st_blocks * 512, _MIN_FILE_BYTES)


@contextlib.contextmanager
def _unlock(folder: str, within: tuple[str, ...]) -> Iterator[None]:
    """Add the permissions to list a folder during the block."""
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
    """Return the bytes of files that processes have open or mapped but that no walk finds.

    Such files take space: they are deleted, or in folders that are renamed constantly or may not be
    entered. Not counted: a deleted file that is only in a message between two sockets and, unless
    this process is root, a file that is only mapped or that is open in a process that may not be
    inspected.
    """
    sizes: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for count, (status, path) in enumerate(_held_files(root)):
        if count == _MAX_HELD_FILES:
            return _UNBOUNDED
        key = (status.st_dev, status.st_ino)
        is_mapped = "/map_files/" in path
        if key in seen or (is_mapped and status.st_nlink > 0):
            continue
        seen.add(key)
        if status.st_nlink == 0 or _is_hidden(root, path, status):
            # By inode only: in an overlay, open and mapped files have different device numbers.
            size = status.st_blocks * 512
            sizes[status.st_ino] = max(size, sizes.get(status.st_ino, 0))
    return sum(sizes.values())


def _held_files(root: Path) -> Iterator[tuple[os.stat_result, str]]:
    """Yield (status, path) of files that processes have open, or mapped, which only root sees."""
    for process in _numbered(f"{root}/proc"):
        for status, path in _open_files(f"{process}/map_files"):
            if status.st_dev != _anonymous_device():
                yield status, path
        # Each thread may have its own open files, and the main thread may have ended.
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
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    yield status, entry.path


def _is_hidden(root: Path, path: str, status: os.stat_result) -> bool:
    """Return whether an open file is not at its path, as when folders are being renamed."""
    for _ in range(_LOOKUPS):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(f"{root}{os.readlink(path)}"), status):  # noqa: PTH115
                return False
    in_memory = {_anonymous_device()}  # file systems that count for the memory limit
    with contextlib.suppress(OSError):
        in_memory.add((root / "dev/shm").stat().st_dev)
    return status.st_dev not in in_memory


@functools.cache
def _anonymous_device() -> int:
    """Return the device number of the kernel's file system for anonymous shared memory."""
    handle = os.memfd_create("tugline")
    try:
        return os.fstat(handle).st_dev
    finally:
        os.close(handle)
