"""A sandbox's copy-on-write view of a workspace.

The base is a read-only folder that many sandboxes share; what a sandbox writes goes to its `upper`
folder (overlayfs), so one for a 20,000-file repository is made in a millisecond and changes are
read from `upper` alone. A sandbox with a mount namespace of its own mounts it there
(`mount_options`), so that nothing is left when it dies; for all others it is mounted on this
machine (`mount`) and must be unmounted. A mount outlives its process, so mounts are looked up in
the mount table: `unmount_all` finds what a killed process left. Where there is no overlayfs, the
base is copied. Without a base it is a plain folder, compared with its initial files.

The upper folder is as hostile as a workdir: see `patch`. Initial files are part of the old state.
"""

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from tugline import log
from tugline.errors import DiskFull, SandboxError
from tugline.sandbox.files import is_executable, remove, translate_errors, write_files
from tugline.sandbox.patch import (
    IGNORED,
    ChangeCollector,
    FileChange,
    Patch,
    PatchLimits,
    collect_patch,
    read_change,
)

_OPAQUE = frozenset({"trusted.overlay.opaque", "user.overlay.opaque"})
_WHITEOUT = frozenset({"trusted.overlay.whiteout", "user.overlay.whiteout"})
_BLOCK = 1 << 20
_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "\\:,"})
"""Colons separate layers for the kernel, commas options."""
_NOSUID_NODEV = 2 | 4
_DETACH = 2
_TABLE = Path("/proc/self/mountinfo")
"""Read by ourselves: psutil believes ``/etc/mtab``, which is stale in some images."""
_log = log.get("sandbox")


class OverlayWorkspace:
    """One sandbox's view of a `base`. Its methods block: call them from a thread.

    With a base: `lower` is it, `upper` takes what is written, `scratch` is overlayfs' own. Without
    one `lower` is None, and only `work` is there: a plain folder.
    """

    def __init__(self, directory: Path, base: Path | None, files: Mapping[str, str]) -> None:
        self.work = directory / "work"
        """The folder itself, or where `mount` puts it."""
        self.lower = base
        self.upper = directory / "upper"
        self.scratch = directory / "scratch"
        self._directory = directory
        self._files = {str(PurePosixPath(path)): text for path, text in files.items()}
        self._hidden = tuple(f"{path}/" for path in self._files)
        self._folders = {str(up) for path in self._files for up in PurePosixPath(path).parents}
        self.own = self.upper if base else self.work
        """What holds what this sandbox has written: `work` if that is a copy of the base."""

    def make(self) -> None:
        """Create the folders with the initial files. Raises `SandboxError` if one is not empty."""
        with translate_errors(f"cannot make {self._directory}"):
            for folder in (self.work, self.upper, self.scratch) if self.lower else (self.work,):
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()):
                    msg = f"{folder} is not empty; each session needs a folder of its own"
                    raise SandboxError(msg)
            self._copy_base_modes()
        write_files(self.own, {path: self._initial_file(path) for path in self._files})

    def mount_options(self, *, private: bool) -> str:
        """Empty `scratch`, as each mount needs it, and return the options of ``mount -t overlay``.

        `private`: it is mounted without privileges, in a user namespace. The last option,
        ``volatile``, avoids flushing what is thrown away; kernels before 5.10 lack it.
        """
        with translate_errors(f"cannot empty {self.scratch}"):
            remove(self._directory, self.scratch.name)
            self.scratch.mkdir()
        places = {"lowerdir": self.lower, "upperdir": self.upper, "workdir": self.scratch}
        options = [f"{name}={str(path).translate(_ESCAPED)}" for name, path in places.items()]
        options += ["userxattr" if private else "redirect_dir=nofollow"]
        return ",".join([*options, "index=off", "metacopy=off", "volatile"])

    def mount(self) -> None:
        """Mount it at `work` of this machine; without overlayfs, copy the base."""
        if not self.lower:
            return
        if error := mount_overlay(self.work, self.mount_options(private=False)):
            _log.warning("workspace copied", folder=str(self.lower), error=f"no overlay: {error}")
            copy(self.lower, self.work)
            write_files(self.work, self._files)
            self.own = self.work

    def unmount(self) -> None:
        """Undo `mount`, also while a program still uses it."""
        unmount_all(self.work)

    def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Return what was changed; no program runs."""
        limits = limits or PatchLimits()
        collector = ChangeCollector(limits, lambda path: self._before(path, limits.file_bytes))
        return collect_patch(collector, self._collect)

    def _copy_base_modes(self) -> None:
        """Give folders of the upper layer the mode and owner that they have in the base."""
        for path in sorted({".", *self._folders}, key=len):
            found = self._base_path(path)
            if found is not None and found.is_dir() and not found.is_symlink():
                target = self.upper / path
                target.mkdir(exist_ok=True)
                shutil.copystat(found, target)
                if os.geteuid() == 0:
                    os.chown(target, found.stat().st_uid, found.stat().st_gid)

    # ------------------------------------------------------------------ the old state
    def _base_path(self, path: str) -> Path | None:
        """Return its path in the base; None if the folder is missing there, or a link."""
        if self.lower is None:
            return None
        here = self.lower
        for name in PurePosixPath(path).parent.parts:
            here /= name
            if here.is_symlink() or not here.is_dir():
                return None
        return here / PurePosixPath(path).name

    def _old_file(self, path: str) -> Path | None:
        """Return a file or link of the base that no initial file hides."""
        if path in self._folders or path.startswith(self._hidden):
            return None
        found = self._base_path(path)
        there = found is not None and (
            found.is_symlink() or (found.exists() and not found.is_dir())
        )
        return found if there else None

    def _initial_file(self, path: str) -> FileChange:
        """Return an initial file, executable if the base's file at this path is."""
        found = self._base_path(path)
        executable = found is not None and is_executable(found)
        return FileChange(self._files[path].encode(), executable=executable)

    def _before(self, path: str, max_bytes: int) -> FileChange | None:
        if path in self._files:
            return self._initial_file(path)
        found = self._old_file(path)
        # A file that is too large is not equal to any that is not.
        change = read_change(str(found), max_bytes) if found else None
        return change if isinstance(change, FileChange) else None

    def _remove_path(self, collector: ChangeCollector, path: str) -> None:
        """Add the removal of `path` and everything below it, which later additions may undo."""
        if path in self._files or self._old_file(path):
            collector.add_removed(path)
        else:
            self._remove_below(collector, path)

    def _remove_below(
        self, collector: ChangeCollector, path: str, but: Collection[str] = ()
    ) -> None:
        """Add the removal of what the base has below `path`, but for some."""
        folder = self._base_path(path)
        if folder is None or folder.is_symlink() or IGNORED & set(path.split("/")):
            return
        for here, folders, files in os.walk(folder):
            links = [name for name in folders if Path(here, name).is_symlink()]
            folders[:] = [name for name in folders if name not in IGNORED]
            for name in [*files, *links]:
                below = str(PurePosixPath(path, Path(here, name).relative_to(folder)))
                if below not in but and self._old_file(below):
                    collector.add_removed(below)

    def _add_if_changed(
        self, collector: ChangeCollector, path: str, entry: os.DirEntry[str]
    ) -> None:
        was = None if path in self._files else self._old_file(path)
        if was is not None and _same(Path(entry.path), was):
            collector.keep(path)
        else:
            collector.count()
            collector.add_entry(path, entry)

    # ------------------------------------------------------------------ the new state
    def _collect(self, collector: ChangeCollector) -> None:
        """Add what is in the upper layer, a plain folder or a copy, and what is not any more."""
        seen: set[str] = set()
        stack = [("", str(self.own))]
        while stack:
            for path, entry in collector.list_folder(*stack.pop()):
                try:
                    kind = self._read_entry(collector, path, entry)
                except OSError as error:  # of a path that is too long, say
                    collector.note(path, f"cannot be read ({error.strerror})")
                    kind = "file"
                if kind == "folder":
                    stack.append((f"{path}/", entry.path))
                elif kind == "file":
                    seen.add(path)
        if self.own == self.work:  # nothing in it marks what was removed
            self._remove_below(collector, "", but=seen)
        for path in self._files.keys() - seen:
            if not IGNORED & set(path.split("/")):
                collector.add_removed(path)

    def _read_entry(self, collector: ChangeCollector, path: str, entry: os.DirEntry[str]) -> str:
        """Add an entry; return whether it is a file, a folder to be searched, or neither."""
        layered = self.own == self.upper
        if entry.is_dir(follow_symlinks=False):
            if layered or self.lower is None:
                collector.count()  # of a copy, only what has changed counts
            if not collector.should_enter(path, entry.name):
                return ""
            if layered and (_has_xattr(entry, _OPAQUE) or self._old_file(path)):
                self._remove_path(collector, path)
            return "folder"
        if layered and _is_whiteout(entry):
            self._remove_path(collector, path)
            return ""
        if layered:
            self._remove_below(collector, path)
        self._add_if_changed(collector, path, entry)
        return "file"


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    """Whether it marks a removal: a device 0:0, or an empty file with an attribute."""
    found = entry.stat(follow_symlinks=False)
    if stat.S_ISCHR(found.st_mode):
        return found.st_rdev == 0
    empty = stat.S_ISREG(found.st_mode) and found.st_size == 0
    return empty and _has_xattr(entry, _WHITEOUT)


def _has_xattr(entry: os.DirEntry[str], names: frozenset[str]) -> bool:
    return bool(names & set(os.listxattr(entry.path, follow_symlinks=False)))


def _same(path: Path, was: Path) -> bool:
    """Whether two files or links have equal mode and content."""
    now, then = path.lstat(), was.lstat()
    if now.st_mode != then.st_mode or now.st_size != then.st_size:
        return False
    if not stat.S_ISREG(now.st_mode):
        return stat.S_ISLNK(now.st_mode) and path.readlink() == was.readlink()
    with path.open("rb") as left, was.open("rb") as right:
        while block := left.read(_BLOCK):
            if block != right.read(_BLOCK):
                return False
    return True


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


def unmount_all(directory: Path) -> int:
    """Unmount everything at or below `directory`; return how many mounts.

    At once, or what is busy as soon as it is not any more.
    """
    directory = directory.resolve()
    found = [path for path in _mount_points() if path.is_relative_to(directory)]
    libc = ctypes.CDLL(None, use_errno=True)
    for path in reversed(found):  # the last one covers those before
        target = os.fsencode(path)
        if libc.umount2(target, 0) and libc.umount2(target, _DETACH):
            raise SandboxError(f"cannot unmount {path}: {os.strerror(ctypes.get_errno())}")
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


def _mount_points() -> list[Path]:
    """Return them in the order in which they were mounted."""
    if not _TABLE.exists():
        return []
    names = [line.split(b" ")[4] for line in _TABLE.read_bytes().splitlines()]
    # The table writes a space as \040.
    unescape = partial(re.sub, rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]))
    return [Path(os.fsdecode(unescape(name))) for name in names]
