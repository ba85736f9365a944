"""What processes of a box hold of files that no walk of its folders finds.

A file takes its room for as long as anybody has it open or mapped: deleted, or in folders that are
renamed all the time or may not be entered. Not seen: a deleted file that is nowhere but in a
message on its way between two sockets; and, where this is not run by root, one that is only mapped
or held by a process that forbids to be looked at.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

_MAPS = 64 << 20
"""Bytes of the kernel's lists of what is mapped: nobody has so many but to hide something."""
_FAR_TOO_MUCH = 1 << 62
_TRIES = 3
_DELETED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .* \(deleted\)$", re.MULTILINE)


def held(root: Path) -> int:
    """Bytes of it. `root` is the box's file system as seen from here, with its ``proc``."""
    sizes: dict[int, int] = {}
    looked: set[tuple[int, int]] = set()
    left = _MAPS
    for process in _numbers(root / "proc"):
        read = False
        # Each thread may have open files of its own, and the first one may have ended.
        for thread in _numbers(f"{process}/task"):
            for found, path in _files(f"{thread}/fd"):
                if (known := (found.st_dev, found.st_ino)) not in looked:
                    looked.add(known)
                    if found.st_nlink == 0 or _hidden(root, path, found):
                        _add(sizes, found)
            if not read:
                maps = _maps(thread, left)
                left -= len(maps)
                read = bool(maps)
                for found in _mapped(process, maps):
                    _add(sizes, found)
            if left <= 0:
                return _FAR_TOO_MUCH
    return sum(sizes.values())


def _add(sizes: dict[int, int], found: os.stat_result) -> None:
    # By number alone: an overlay shows files as those of another disk than they are mapped from.
    size = found.st_blocks * 512
    sizes[found.st_ino] = max(size, sizes.get(found.st_ino, 0))


def _numbers(folder: Path | str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield entry.path


def _files(folder: str) -> Iterator[tuple[os.stat_result, str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                found = entry.stat()
                if stat.S_ISREG(found.st_mode):
                    yield found, entry.path


def _hidden(root: Path, path: str, found: os.stat_result) -> bool:
    """Whether an open file cannot be found where it is said to be, as when folders are renamed."""
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(f"{root}{os.readlink(path)}"), found):  # noqa: PTH115
                return False
    return found.st_dev not in _in_memory(root)


def _in_memory(root: Path) -> set[int]:
    found = {_anonymous()}
    with contextlib.suppress(OSError):
        found.add((root / "dev/shm").stat().st_dev)
    return found


@functools.cache
def _anonymous() -> int:
    """The kernel's file system of shared memory that has no name."""
    handle = os.memfd_create("tugline")
    try:
        return os.fstat(handle).st_dev
    finally:
        os.close(handle)


def _maps(thread: str, most: int) -> bytes:
    with contextlib.suppress(OSError), Path(thread, "maps").open("rb", buffering=1 << 20) as file:
        return file.read(most)
    return b""


def _mapped(process: str, maps: bytes) -> Iterator[os.stat_result]:
    """Deleted files that are mapped; to look at those takes root's rights."""
    if b" (deleted)\n" not in maps:
        return
    for start, end in _DELETED.findall(maps):
        place = f"{process}/map_files/{int(start, 16):x}-{int(end, 16):x}"
        with contextlib.suppress(OSError):
            found = os.stat(place)  # noqa: PTH116
            if found.st_nlink == 0 and found.st_dev != _anonymous():
                yield found
