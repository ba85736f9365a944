"""A sandbox's copy-on-write view of a workspace.

The base is a read-only folder shared by many sandboxes; a sandbox's writes go to its `upper` folder
(overlayfs). So a view of a 20,000-file repository is made in a millisecond, and changes are read
from `upper` alone. A sandbox with its own mount namespace mounts the overlay there
(`mount_options`), so that the mount ends with the sandbox; for others it is mounted on this machine
(`mount`) and must be unmounted. Such a mount outlives its process: `unmount_all` finds it in the
mount table. Without overlayfs, the base is copied. Without a base, the workspace is a plain folder,
which is compared with its initial files.

The upper folder is as hostile as a workdir: see `patch`. Initial files are part of the old state.
"""

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from tugline import log
from tugline.errors import DiskFull, SandboxError
from tugline.patch import FileChange, Patch
from tugline.sandbox.files import is_executable, remove, translate_errors, write_files
from tugline.sandbox.patch import IGNORED, ChangeCollector, PatchLimits, collect_patch, read_change

_OPAQUE = frozenset({"trusted.overlay.opaque", "user.overlay.opaque"})
_WHITEOUT = frozenset({"trusted.overlay.whiteout", "user.overlay.whiteout"})
_BLOCK = 1 << 20
_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "\\:,"})
"""Escapes for mount options, in which colons separate layers and commas options."""
_NOSUID_NODEV = 2 | 4
_DETACH = 2
_TABLE = Path("/proc/self/mountinfo")
"""The kernel's mount table; psutil reads ``/etc/mtab``, which is stale in some images."""
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded once: each `CDLL` is a class of its own, in cycles of references."""
_log = log.get("sandbox")


class OverlayWorkspace:
    """A sandbox's view of a `base`. Methods block: call them in a thread.

    `lower` is the base, `upper` the folder of changes, `scratch` the work folder of overlayfs.
    Without a base `lower` is None and only `work` exists, a plain folder.
    """

    def __init__(self, directory: Path, base: Path | None, files: Mapping[str, str]) -> None:
        self.work = directory / "work"
        """The plain folder, or the mount point of the overlay."""
        self.lower = base
        self.upper = directory / "upper"
        self.scratch = directory / "scratch"
        self._directory = directory
        self._files = {str(PurePosixPath(path)): text for path, text in files.items()}
        self._hidden = tuple(f"{path}/" for path in self._files)
        self._folders = {str(up) for path in self._files for up in PurePosixPath(path).parents}
        self.own = self.upper if base else self.work
        """Folder with this sandbox's changes: `upper`, or `work` without an overlay."""

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

    def mount_options(
        self, *, private: bool, locate: Callable[[Path], Path] = lambda path: path
    ) -> str:
        """Empty `scratch`, as each mount requires, and return options for ``mount -t overlay``.

        `private` is for a mount without privileges, in a user namespace. `locate` returns where a
        folder is in the mount namespace of the overlay. The last option,
        ``volatile``, avoids flushing temporary data to disk; kernels before 5.10 lack it.
        """
        with translate_errors(f"cannot empty {self.scratch}"):
            remove(self._directory, self.scratch.name)
            self.scratch.mkdir()
        folders = {"lowerdir": self.lower, "upperdir": self.upper, "workdir": self.scratch}
        places = {name: str(locate(path)) for name, path in folders.items() if path}
        options = [f"{name}={place.translate(_ESCAPED)}" for name, place in places.items()]
        options += ["userxattr" if private else "redirect_dir=nofollow"]
        return ",".join([*options, "index=off", "metacopy=off", "volatile"])

    def mount(self) -> None:
        """Mount the overlay at `work` on this machine; without overlayfs, copy the base."""
        if not self.lower:
            return
        if error := mount_overlay(self.work, self.mount_options(private=False)):
            _log.warning(
                "workspace copied", folder=str(self.lower), error=f"overlayfs failed: {error}"
            )
            copy(self.lower, self.work)
            write_files(self.work, self._files)
            self.own = self.work

    def unmount(self) -> None:
        """Undo `mount`, even while a program uses the folder."""
        unmount_all(self.work)

    def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Return the changes; no program may be running."""
        limits = limits or PatchLimits()
        collector = ChangeCollector(limits, lambda path: self._before(path, limits.file_bytes))
        return collect_patch(collector, self._collect)

    def _copy_base_modes(self) -> None:
        """Copy mode and owner of the base's folders to those of the upper layer."""
        for path in sorted({".", *self._folders}, key=len):
            source = self._base_path(path)
            if source is not None and source.is_dir() and not source.is_symlink():
                target = self.upper / path
                target.mkdir(exist_ok=True)
                shutil.copystat(source, target)
                if os.geteuid() == 0:
                    os.chown(target, source.stat().st_uid, source.stat().st_gid)

    # ------------------------------------------------------------------ the old state
    def _base_path(self, path: str) -> Path | None:
        """Return a path in the base; None if its folder is missing there or below a link."""
        if self.lower is None:
            return None
        folder = self.lower
        for name in PurePosixPath(path).parent.parts:
            folder /= name
            if folder.is_symlink() or not folder.is_dir():
                return None
        return folder / PurePosixPath(path).name

    def _old_file(self, path: str) -> Path | None:
        """Return the base's file or link at `path`, unless an initial file hides it."""
        if path in self._folders or path.startswith(self._hidden):
            return None
        old = self._base_path(path)
        exists = old is not None and (old.is_symlink() or (old.exists() and not old.is_dir()))
        return old if exists else None

    def _has_old_folder(self, path: str) -> bool:
        """Return whether the old state has a folder at `path`."""
        if path in self._folders:
            return True
        old = self._base_path(path)
        hidden = path in self._files or path.startswith(self._hidden)
        return not hidden and old is not None and old.is_dir() and not old.is_symlink()

    def _initial_file(self, path: str) -> FileChange:
        """Return an initial file, executable if the base's file at this path is."""
        old = self._base_path(path)
        executable = old is not None and is_executable(old)
        return FileChange(self._files[path].encode(), executable=executable)

    def _before(self, path: str, max_bytes: int) -> FileChange | None:
        if path in self._files:
            return self._initial_file(path)
        old = self._old_file(path)
        # An old file that is too large differs from any new file that is not.
        change = read_change(str(old), max_bytes) if old else None
        return change if isinstance(change, FileChange) else None

    def _remove_path(self, collector: ChangeCollector, path: str) -> None:
        """Add the removal of `path` and everything below it; additions may replace it later."""
        if path in self._files or self._old_file(path):
            collector.add_removed(path)
        else:
            self._remove_below(collector, path)

    def _remove_below(
        self, collector: ChangeCollector, path: str, except_: Collection[str] = ()
    ) -> None:
        """Add the removal of the base's files and folders below `path`, except files in `except_`.

        A folder with ignored files in it stays.
        """
        folder = self._base_path(path)
        if folder is None or folder.is_symlink() or IGNORED & set(path.split("/")):
            return
        stay: set[Path] = set()
        for parent, folders, files in os.walk(folder):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            if IGNORED & set(folders):
                stay |= {Path(parent), *Path(parent).parents}
            folders[:] = [name for name in folders if name not in IGNORED]
            below = PurePosixPath(path, Path(parent).relative_to(folder))
            if self._has_old_folder(str(below)):
                collector.add_gone_folder(str(below))
            for name in [*files, *links]:
                if str(below / name) not in except_ and self._old_file(str(below / name)):
                    collector.add_removed(str(below / name))
        for each in stay:
            if each.is_relative_to(folder):
                collector.keep_folder(str(PurePosixPath(path, each.relative_to(folder))))

    def _add_if_changed(
        self, collector: ChangeCollector, path: str, entry: os.DirEntry[str]
    ) -> None:
        old = None if path in self._files else self._old_file(path)
        if old is not None and _same(Path(entry.path), old):
            collector.keep(path)
        else:
            collector.count()
            collector.add_entry(path, entry)

    # ------------------------------------------------------------------ the new state
    def _collect(self, collector: ChangeCollector) -> None:
        """Add new, changed and removed files of the upper layer, the plain folder or the copy."""
        seen: set[str] = set()
        collector.keep_folder(".")
        for path in self._list_searched(self._folders):
            collector.add_gone_folder(path)
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
        if self.own == self.work:  # has no whiteouts for removed files
            self._remove_below(collector, "", except_=seen)
        for path in self._list_searched(self._files.keys() - seen):
            collector.add_removed(path)

    def _list_searched(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if not IGNORED & set(path.split("/"))]

    def _read_entry(self, collector: ChangeCollector, path: str, entry: os.DirEntry[str]) -> str:
        """Add an entry; return "file", "folder" for a folder to search, or an empty string."""
        layered = self.own == self.upper
        if entry.is_dir(follow_symlinks=False):
            if layered or self.lower is None:
                collector.count()  # of a copy, only changed entries count
            if not collector.should_enter(path, entry.name):
                return ""
            if layered and (_has_xattr(entry, _OPAQUE) or self._old_file(path)):
                self._remove_path(collector, path)
            collector.keep_folder(path)
            if not self._has_old_folder(path):
                collector.add_folder(path)
            return "folder"
        if layered and _is_whiteout(entry):
            self._remove_path(collector, path)
            return ""
        if layered:
            self._remove_below(collector, path)
        self._add_if_changed(collector, path, entry)
        return "file"


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry marks a removal: device 0:0, or an empty file with an attribute."""
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    empty = stat.S_ISREG(status.st_mode) and status.st_size == 0
    return empty and _has_xattr(entry, _WHITEOUT)


def _has_xattr(entry: os.DirEntry[str], names: frozenset[str]) -> bool:
    return bool(names & set(os.listxattr(entry.path, follow_symlinks=False)))


def _same(path: Path, old: Path) -> bool:
    """Return whether two files or links have equal mode and content."""
    new_status = path.lstat()
    old_status = old.lstat()
    if new_status.st_mode != old_status.st_mode or new_status.st_size != old_status.st_size:
        return False
    if not stat.S_ISREG(new_status.st_mode):
        return stat.S_ISLNK(new_status.st_mode) and path.readlink() == old.readlink()
    with path.open("rb") as left, old.open("rb") as right:
        while block := left.read(_BLOCK):
            if block != right.read(_BLOCK):
                return False
    return True


def mount_overlay(target: Path, options: str) -> str | None:
    """Mount an overlay at `target`; return the error if the kernel refuses."""
    if sys.platform != "linux":
        return "overlayfs needs Linux"
    for attempt in (options, options.removesuffix(",volatile")):
        data = os.fsencode(attempt)
        if _LIBC.mount(b"overlay", os.fsencode(target), b"overlay", _NOSUID_NODEV, data) == 0:
            return None
    return os.strerror(ctypes.get_errno())


def unmount_all(directory: Path) -> int:
    """Unmount everything at or below `directory`; return the number of mounts.

    Busy mounts are detached lazily (``MNT_DETACH``).
    """
    directory = directory.resolve()
    mounts = [path for path in _mount_points() if path.is_relative_to(directory)]
    for path in reversed(mounts):  # a later mount may cover earlier ones
        target = os.fsencode(path)
        if _LIBC.umount2(target, 0) and _LIBC.umount2(target, _DETACH):
            raise SandboxError(f"cannot unmount {path}: {os.strerror(ctypes.get_errno())}")
    return len(mounts)


def copy(source: Path, target: Path) -> None:
    """Copy the contents of `source` into `target`: with owners, modes, links, devices, attributes.

    Shares blocks if the file system supports it. Raises `DiskFull` and `SandboxError`.
    """
    sharing = ["--reflink=auto"] if sys.platform == "linux" else []
    argv = ["cp", "-a", *sharing, "--", f"{source}/.", str(target)]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()
        msg = f"cannot copy {source} to {target}: {reason[-300:]}"
        raise DiskFull(msg) if "No space left" in reason else SandboxError(msg)


def _mount_points() -> list[Path]:
    """Return all mount points in the order of mounting."""
    if not _TABLE.exists():
        return []
    names = [line.split(b" ")[4] for line in _TABLE.read_bytes().splitlines()]
    # The table writes a space as \040.
    unescape = partial(re.sub, rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]))
    return [Path(os.fsdecode(unescape(name))) for name in names]
