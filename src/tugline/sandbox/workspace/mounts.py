"""Mount overlays on this machine, by the kernel or by fuse-overlayfs, and copy folders.

A mount outlives its process, so mounts are always looked up in the mount table: `unmount_all` finds
what a killed process left.
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


def mount_overlay(target: Path, options: str) -> str | None:
    """Mount an overlay at `target`; return the error if the kernel refuses."""
    if sys.platform != "linux":
        return "there is none on this system"
    libc = ctypes.CDLL(None, use_errno=True)
    for attempt in (options, options.removesuffix(",volatile")):
        data = os.fsencode(attempt)
        if libc.mount(b"overlay", os.fsencode(target), b"overlay", _NOSUID_NODEV, data) == 0:
            return None
    return os.strerror(ctypes.get_errno())


def mount_fuse_overlay(target: Path, options: str) -> bool:
    """Mount an overlay by fuse-overlayfs; return whether that worked."""
    program = shutil.which("fuse-overlayfs")
    if program is None:
        return False
    folders = ",".join(re.split(r"(?<!\\),", options)[:3])
    done = subprocess.run([program, "-o", folders, str(target)], capture_output=True, check=False)
    return done.returncode == 0


def is_mounted(path: Path) -> bool:
    """Return whether something is mounted at `path`."""
    return path.resolve() in _mount_points()


def unmount_all(directory: Path) -> int:
    """Unmount everything at or below `directory`, busy or not; return how many mounts."""
    directory = directory.resolve()
    found = [path for path in _mount_points() if path.is_relative_to(directory)]
    for path in reversed(found):  # the last one covers those before
        _unmount(path)
    return len(found)


def copy(source: Path, target: Path) -> None:
    """Copy the contents of `source` into `target`: with owners, modes, links, devices, attributes.

    Shares blocks where the disk can. Raises `DiskFull` and `SandboxError`.
    """
    sharing = ["--reflink=auto"] if sys.platform == "linux" else []
    argv = ["cp", "-a", *sharing, "--", f"{source}/.", str(target)]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        msg = f"cannot copy {source} to {target}: {reason[-300:]}"
        raise DiskFull(msg) if "No space left" in reason else SandboxError(msg)


def _unmount(path: Path) -> None:
    """Unmount at once, or as soon as it is not busy any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), 0) == 0 or libc.umount2(os.fsencode(path), _DETACH) == 0:
        return
    reason = os.strerror(ctypes.get_errno())
    program = shutil.which("fusermount3") or "fusermount"
    argv = [program, "-u", "-z", str(path)]
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        msg = f"cannot unmount {path}: {reason}"
        raise SandboxError(msg)


def _mount_points() -> list[Path]:
    """Return them in the order in which they were mounted."""
    if not _TABLE.exists():
        return []
    lines = _TABLE.read_bytes().splitlines()
    return [Path(os.fsdecode(_unescape(line.split(b" ")[4]))) for line in lines]


def _unescape(name: bytes) -> bytes:
    r"""Decode a name of the mount table, which writes a space as ``\040``."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), name)
