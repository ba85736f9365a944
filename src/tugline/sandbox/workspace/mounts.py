"""Overlays on this machine: by the kernel where we may, else by fuse-overlayfs; and copies.

A mount outlives its process, so what is mounted is never remembered but looked up: `unmount_all`
finds what a killed process left.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tugline.errors import DiskFull, SandboxError

_NOSUID_NODEV = 2 | 4
_DETACH = 2
_TABLE = Path("/proc/self/mountinfo")


def overlay(target: Path, options: str) -> str | None:
    """Mount an overlay of the kernel's at `target`; the reason where it refuses."""
    if sys.platform != "linux":
        return "there is none on this system"
    libc = ctypes.CDLL(None, use_errno=True)
    for tried in (options, options.removesuffix(",volatile")):
        data = os.fsencode(tried)
        if libc.mount(b"overlay", os.fsencode(target), b"overlay", _NOSUID_NODEV, data) == 0:
            return None
    return os.strerror(ctypes.get_errno())


def fuse_overlay(target: Path, options: str) -> bool:
    """The same by fuse-overlayfs, where it is installed and may be used."""
    program = shutil.which("fuse-overlayfs")
    if program is None:
        return False
    places = ",".join(re.split(r"(?<!\\),", options)[:3])
    done = subprocess.run([program, "-o", places, str(target)], capture_output=True, check=False)
    return done.returncode == 0


def mounted(path: Path) -> bool:
    """Whether something is mounted at `path`."""
    return path.resolve() in _mount_points()


def unmount_all(directory: Path) -> int:
    """Unmount whatever is mounted at or below `directory`, busy or not; returns how many."""
    directory = directory.resolve()
    found = [path for path in _mount_points() if path.is_relative_to(directory)]
    for path in reversed(found):  # the last one covers those before
        _unmount(path)
    return len(found)


def copy(source: Path, target: Path) -> None:
    """Copy all that is in `source` into `target`, as it is: owners, modes, links, devices, marks.

    Shares blocks where the disk can. Raises `DiskFull` and `SandboxError`.
    """
    sharing = ["--reflink=auto"] if sys.platform == "linux" else []
    argv = ["cp", "-a", *sharing, "--", f"{source}/.", str(target)]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        msg = f"cannot copy {source} to {target}: {said[-300:]}"
        raise DiskFull(msg) if "No space left" in said else SandboxError(msg)


def _unmount(path: Path) -> None:
    """At once if nobody uses it, else as soon as nobody does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), 0) == 0 or libc.umount2(os.fsencode(path), _DETACH) == 0:
        return
    why = os.strerror(ctypes.get_errno())
    program = shutil.which("fusermount3") or "fusermount"
    argv = [program, "-u", "-z", str(path)]
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        msg = f"cannot unmount {path}: {why}"
        raise SandboxError(msg)


def _mount_points() -> list[Path]:
    """In the order in which they were mounted."""
    if not _TABLE.exists():
        return []
    lines = _TABLE.read_bytes().splitlines()
    return [Path(os.fsdecode(_plain(line.split(b" ")[4]))) for line in lines]


def _plain(name: bytes) -> bytes:
    r"""A name of the table, in which spaces and the like are written as ``\040``."""
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), name)
