"""A box's own view of a workspace that nobody may change: a base with a copy-on-write layer.

The base is a read-only folder that many boxes share; what a box writes goes to its `upper` folder
(overlayfs), so a box of a 20,000-file repository is made in a millisecond and what its agent did is
read from `upper` alone. A sandbox with a mount namespace of its own mounts it there (`prepare`), so
that nothing is left when it dies; for all others it is mounted on this machine (`mount`) and must
be unmounted (`unmount`, `unmount_all` after a kill). Where no overlay can be had, the base is
copied. Without a base the layer is a plain folder, compared with the files it began with.

The upper folder is as hostile as a workdir: see `patch.py`. Initial files are part of what was
there before.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tugline import log
from tugline.errors import SandboxError
from tugline.sandbox.files import faults, put, remove
from tugline.sandbox.patch import (
    PASSED,
    FileChange,
    Gatherer,
    Patch,
    PatchLimits,
    compare,
    gathered,
    read,
)
from tugline.sandbox.workspace.mounts import copy, fuse_overlay, mounted, overlay, unmount_all

_OPAQUE = frozenset({"trusted.overlay.opaque", "user.overlay.opaque", "user.fuseoverlayfs.opaque"})
_FUSE_OPAQUE = frozenset({".wh..wh..opq", ".wh..opq"})
"""Files by which fuse-overlayfs says the same."""
_WHITEOUT = frozenset({"trusted.overlay.whiteout", "user.overlay.whiteout"})
_BLOCK = 1 << 20
_log = log.get("runtimes")


class OverlayWorkspace:
    """What one box sees of a `base`. Its methods block: call them from a thread.

    With a base: `lower` is it, `upper` takes what is written, `scratch` is overlayfs' own. Without
    one they are None, and `work` is a plain folder.
    """

    def __init__(
        self,
        directory: Path,
        base: Path | None,
        files: Mapping[str, str],
        snapshot: Path | None = None,
    ) -> None:
        self.work = directory / "work"
        """The folder itself, or where `mount` puts it."""
        self.lower = base
        self.upper = directory / "upper" if base else None
        self.scratch = directory / "scratch" if base else None
        self._directory = directory
        self._files = {str(PurePosixPath(path)): text for path, text in files.items()}
        self._hidden = tuple(f"{path}/" for path in self._files)
        self._folders = {str(up) for path in self._files for up in PurePosixPath(path).parents}
        self._snapshot, self._copied = snapshot, 0
        """When the base was copied, as the disk tells the time; 0 if it was not."""

    @property
    def own(self) -> Path:
        """The folder that holds what is this box's alone."""
        return self.upper if self.upper and not self._copied else self.work

    def make(self) -> None:
        """Make the folders with their files, or as they were when the snapshot was taken.

        Raises `SandboxError` where something is there already.
        """
        with faults(f"cannot make {self._directory}"):
            for folder in filter(None, (self.work, self.upper, self.scratch)):
                folder.mkdir(parents=True, exist_ok=True)
                if any(folder.iterdir()):
                    msg = f"{folder} is not empty; each session needs a folder of its own"
                    raise SandboxError(msg)
            self._like_the_base()
        if self._snapshot is not None:
            copy(self._snapshot, self.own)
        else:
            put(self.own, {path: self._initial(path) for path in self._files})

    def prepare(self, *, private: bool) -> str:
        """Empty `scratch`, as each mount needs it, and give the options for ``mount -t overlay``.

        `private`: it is mounted without privileges, in a user namespace. The last option,
        ``volatile``, spares the disk a flush of what is thrown away; kernels before 5.10 lack it.
        """
        if not self.lower or not self.upper or not self.scratch:
            msg = f"{self.work} has no base to be mounted"
            raise SandboxError(msg)
        with faults(f"cannot empty {self.scratch}"):
            remove(self._directory, self.scratch.name)
            self.scratch.mkdir()
        places = {"lowerdir": self.lower, "upperdir": self.upper, "workdir": self.scratch}
        options = [f"{name}={_escaped(path)}" for name, path in places.items()]
        options += ["userxattr" if private else "redirect_dir=nofollow"]
        return ",".join([*options, "index=off", "metacopy=off", "volatile"])

    def mount(self) -> Path:
        """See it at `work` of this machine; where there is no overlay, as a copy."""
        if not self.lower or self._copied or mounted(self.work):
            return self.work
        why = overlay(self.work, self.prepare(private=False))
        if why and not fuse_overlay(self.work, self.prepare(private=False)):
            if self._snapshot:
                msg = f"{self.work}: a snapshot cannot be restored without overlayfs ({why})"
                raise SandboxError(msg)
            _log.warning("workspace copied", folder=str(self.lower), error=f"no overlay: {why}")
            copy(self.lower, self.work)
            put(self.work, self._files)
            self._copied = _now(self._directory)
        return self.work

    def unmount(self) -> None:
        """Undo `mount`, also one that a program still uses."""
        unmount_all(self.work)

    def clear(self) -> None:
        """Unmount and remove all that it holds."""
        self.unmount()
        with faults(f"cannot remove {self._directory}"):
            for folder in filter(None, (self.work, self.upper, self.scratch)):
                remove(self._directory, folder.name)

    def snapshot(self, to: Path) -> None:
        """Copy what is its own to `to`, a new folder; no program runs."""
        if self._copied:
            msg = f"{self.work}: no snapshot can be taken without overlayfs"
            raise SandboxError(msg)
        with faults(f"cannot make {to}"):
            to.mkdir(parents=True)
        copy(self.own, to)

    def diff(self, limits: PatchLimits | None = None) -> Patch:
        """What was done to it; no program runs."""
        if not self.lower:
            return compare(self._files, self.work, limits)
        limits = limits or PatchLimits()
        gatherer = Gatherer(limits, lambda path: self._before(path, limits.file_bytes))
        return gathered(gatherer, self._compare_copy if self._copied else self._read_upper)

    def _like_the_base(self) -> None:
        """Folders of the layer that are also the base's have its mode and owner."""
        if not self.lower or not self.upper:
            return
        for path in sorted({".", *self._folders}, key=len):
            found = self._base(path)
            if found is not None and found.is_dir() and not found.is_symlink():
                target = self.upper / path
                target.mkdir(exist_ok=True)
                shutil.copystat(found, target)
                if os.geteuid() == 0:
                    os.chown(target, found.stat().st_uid, found.stat().st_gid)

    # ------------------------------------------------------------------ what was there before
    def _base(self, path: str) -> Path | None:
        """Where the base would have it; None where it has no such folder, or a link for one."""
        here = self.lower or Path()
        for name in PurePosixPath(path).parent.parts:
            here /= name
            if here.is_symlink() or not here.is_dir():
                return None
        return here / PurePosixPath(path).name

    def _was(self, path: str) -> Path | None:
        """A file or link of the base that no initial file hides."""
        if path in self._folders or path.startswith(self._hidden):
            return None
        found = self._base(path)
        there = found is not None and (
            found.is_symlink() or (found.exists() and not found.is_dir())
        )
        return found if there else None

    def _initial(self, path: str) -> FileChange:
        """An initial file; where the base has a file that can be run, so can this be."""
        found = self._base(path)
        mode = found.lstat().st_mode if found and os.path.lexists(found) else 0
        runs = stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)
        return FileChange(self._files[path].encode(), executable=runs)

    def _before(self, path: str, most: int) -> FileChange | None:
        if path in self._files:
            return self._initial(path)
        found = self._was(path)
        # One that is too large to be taken along is not equal to any that is not.
        change = read(str(found), most) if found else None
        return change if isinstance(change, FileChange) else None

    def _hide(self, gatherer: Gatherer, path: str) -> None:
        """Whatever was at `path` and below is gone; what is seen there later comes back."""
        if path in self._files or self._was(path):
            gatherer.gone(path)
        else:
            self._hide_below(gatherer, path)

    def _hide_below(self, gatherer: Gatherer, path: str) -> None:
        folder = self._base(path)
        if folder is None or folder.is_symlink() or PASSED & set(path.split("/")):
            return
        for here, folders, files in os.walk(folder):
            links = [name for name in folders if Path(here, name).is_symlink()]
            folders[:] = [name for name in folders if name not in PASSED]
            for name in [*files, *links]:
                below = f"{path}/{Path(here, name).relative_to(folder).as_posix()}"
                if self._was(below):
                    gatherer.gone(below)

    def _look(self, gatherer: Gatherer, path: str, entry: os.DirEntry[str]) -> None:
        """Compare a file; one that is large is only read to see whether it is the same."""
        gatherer.look()
        was = None if path in self._files else self._was(path)
        large = entry.stat(follow_symlinks=False).st_size > gatherer.limits.file_bytes
        if not (large and was and _same(Path(entry.path), was)):
            gatherer.file(path, entry)

    # ------------------------------------------------------------------ what is there now
    def _read_upper(self, gatherer: Gatherer) -> None:
        seen: set[str] = set()
        stack = [("", str(self.upper))]
        while stack:
            for path, entry in gatherer.entries(*stack.pop()):
                try:
                    kind = self._read_entry(gatherer, path, entry)
                except OSError as error:  # of a path that is too long, say
                    gatherer.note(path, f"cannot be read ({error.strerror})")
                    kind = "file"
                if kind == "folder":
                    stack.append((f"{path}/", entry.path))
                elif kind == "file":
                    seen.add(path)
        self._missing(gatherer, seen)

    def _read_entry(self, gatherer: Gatherer, path: str, entry: os.DirEntry[str]) -> str:
        """Take it in; what it is: a file, a folder to be looked into, or neither."""
        if entry.is_dir(follow_symlinks=False):
            gatherer.look()
            if not gatherer.enters(path, entry.name):
                return ""
            if _marked(entry, _OPAQUE) or self._was(path):
                self._hide(gatherer, path)
            return "folder"
        if entry.name in _FUSE_OPAQUE:
            return ""
        if _is_whiteout(entry):
            self._hide(gatherer, path)
            return ""
        self._hide_below(gatherer, path)
        self._look(gatherer, path, entry)
        return "file"

    def _compare_copy(self, gatherer: Gatherer) -> None:
        """Files that have the base's size, mode and time are the base's, if not touched since."""
        seen: set[str] = set()
        for path, entry in gatherer.files(self.work, counted=False):
            seen.add(path)
            try:
                was = None if path in self._files else self._was(path)
                found = entry.stat(follow_symlinks=False)
                same = was is not None and _stamp(was.lstat()) == _stamp(found)
                if same and was and found.st_ctime_ns >= self._copied:  # times can be set, not this
                    same = _same(Path(entry.path), was)
                if not same:
                    self._look(gatherer, path, entry)
            except OSError as error:
                gatherer.note(path, f"cannot be read ({error.strerror})")
        for path, _ in gatherer.files(self.lower or Path(), counted=False):
            if path not in seen and self._was(path):
                gatherer.gone(path)
        self._missing(gatherer, seen)

    def _missing(self, gatherer: Gatherer, seen: set[str]) -> None:
        for path in self._files.keys() - seen:
            if not PASSED & set(path.split("/")):
                gatherer.gone(path)


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    """The mark that something of the base is gone: a device 0:0, or an empty file that says so."""
    found = entry.stat(follow_symlinks=False)
    if stat.S_ISCHR(found.st_mode):
        return found.st_rdev == 0
    empty = stat.S_ISREG(found.st_mode) and found.st_size == 0
    return empty and _marked(entry, _WHITEOUT)


def _marked(entry: os.DirEntry[str], marks: frozenset[str]) -> bool:
    return bool(marks & set(os.listxattr(entry.path, follow_symlinks=False)))


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mode, found.st_size, found.st_mtime_ns


def _now(folder: Path) -> int:
    """The time that a change would get, in a folder of the same disk."""
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        return os.fstat(handle).st_ctime_ns
    finally:
        os.close(handle)
        Path(name).unlink()


def _same(path: Path, was: Path) -> bool:
    """Whether two files or links have the same mode and content."""
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


def _escaped(path: Path) -> str:
    """As the kernel reads it: colons part layers, commas options."""
    return "".join(f"\\{sign}" if sign in "\\:," else sign for sign in str(path))
