"""Collect the files that an agent changed, without git and without trusting them.

The workdir is hostile: it may have links that point out of it, endless pipes, undecodable names and
trees of any depth. Only regular files are opened, no link is followed (its target is its content),
everything is limited, and omitted changes are reported in `Patch.notes`. `overlay` reads the upper
layer of an overlay.
"""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import msgspec

from tugline.patch import FileChange, Patch, format_path

SKIPPED = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".git"})
"""Folders of caches and of git, left out without a note."""
INSTALLED = frozenset({"node_modules", ".venv", ".tox", ".nox"})
"""Folders of installed programs, left out with a note."""
IGNORED = SKIPPED | INSTALLED

_MAX_NOTES = 20
_TOO_MANY = "too many changed files; all changes are left out"
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
"""Open flags that do not block on a pipe and do not follow a link."""


class PatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a patch's size and of the search for changes."""

    files: int = 500
    """Number of new and changed files; removed files count in `seen_files` only."""
    seen_files: int = 20_000
    """Number of files examined; with a base, only those that were written or removed."""
    file_bytes: int = 1 << 20
    """Size of one file."""
    total_bytes: int = 16 << 20
    """Size of all files together."""


class _TooManyError(Exception):
    """There are more files than `PatchLimits` allows."""


class ChangeCollector:
    """Collects changes within `limits` and notes omitted ones.

    `before` returns the old file or link at a path, or None.
    """

    def __init__(self, limits: PatchLimits, before: Callable[[str], FileChange | None]) -> None:
        self.limits = limits
        self._before = before
        self._changed: dict[str, FileChange | None] = {}
        self._new_folders: set[str] = set()
        self._gone_folders: set[str] = set()
        self._kept_folders: set[str] = set()
        self._notes: dict[str, None] = {}
        self._seen = self._bytes = 0

    def count(self) -> None:
        """Count an examined file."""
        self._seen += 1
        if self._seen > self.limits.seen_files:
            raise _TooManyError

    def note(self, path: str, reason: str) -> None:
        """Note that `path` is left out, which treats it as unchanged."""
        self._notes[f"{format_path(path)[:200]}: {reason}"] = None

    def add_removed(self, path: str) -> None:
        """Add a removed path."""
        self.count()
        if (reason := unusable_name(path)) is None:
            self._changed[path] = None
        else:
            self.note(path, f"{reason}; its removal is left out")

    def add_entry(self, path: str, entry: os.DirEntry[str]) -> None:
        """Add the current file at `path`."""
        change = read_change(entry.path, self.limits.file_bytes)
        if isinstance(change, FileChange):
            self.add(path, change)
        else:
            self.keep(path)
            self.note(path, change)

    def keep(self, path: str) -> None:
        """Drop the change of a path, which is unchanged."""
        self._changed.pop(path, None)

    def add(self, path: str, change: FileChange) -> None:
        """Add new content, unless it equals the old."""
        self.keep(path)
        if change == self._before(path):
            return
        self._bytes += len(change.data)
        if self._bytes > self.limits.total_bytes:
            self._bytes -= len(change.data)
            self.note(
                path, f"change left out: the patch would exceed {self.limits.total_bytes} bytes"
            )
            return
        self._changed[path] = change
        new = (each is not None for each in self._changed.values())
        if len(self._changed) > self.limits.files and sum(new) > self.limits.files:
            raise _TooManyError

    def add_folder(self, path: str) -> None:
        """Add a folder that is not in the old state; it counts if nothing in it does."""
        self._new_folders.add(path)

    def add_gone_folder(self, path: str) -> None:
        """Add a folder of the old state, which is gone unless `keep_folder` is called for it."""
        if unusable_name(path) is None:
            self._gone_folders.add(path)

    def keep_folder(self, path: str) -> None:
        """Note that a folder is there."""
        self._kept_folders.add(path)

    def list_folder(self, prefix: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield paths and entries of a folder, sorted; unusable names are noted."""
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self.note(prefix, f"cannot be listed ({error.strerror})")
            return
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if (reason := unusable_name(path)) is None:
                yield path, entry
            else:
                self.count()
                self.note(path, reason)

    def should_enter(self, path: str, name: str) -> bool:
        """Return whether to search a folder."""
        if name in INSTALLED:
            self.note(path, "left out: a folder of installed programs")
        return name not in IGNORED

    def build_patch(self) -> Patch:
        """Return all changes, removals first, so that applying them removes no new file."""
        self._add_empty_folders()
        removed: dict[str, FileChange | None] = {
            path: None
            for path in (*sorted(self._gone_folders - self._kept_folders), *self._changed)
            if self._changed.get(path) is None
        }
        notes = list(self._notes)
        rest = len(self._notes) - _MAX_NOTES
        more = (f"and {rest} more notes",) if rest > 0 else ()
        return Patch(removed | self._changed, (*notes[:_MAX_NOTES], *more))

    def _add_empty_folders(self) -> None:
        added = {path for path, change in self._changed.items() if change is not None}
        inner = (PurePosixPath(path).parents for path in added | self._new_folders)
        empty = self._new_folders - added - {str(up) for ups in inner for up in ups}
        if len(added) + len(empty) > self.limits.files:
            self._notes[f"{len(empty)} empty folders left out: too many"] = None
            return
        for path in sorted(empty):
            self._changed.pop(path, None)  # a file that was there
            self._changed[path] = FileChange(b"", folder=True)


def unusable_name(path: str) -> str | None:
    """Return why a patch cannot have a file of that name; None if it can."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "the name is not UTF-8"
    return None


def collect_patch(collector: ChangeCollector, collect: Callable[[ChangeCollector], None]) -> Patch:
    """Return the changes found by `collect`; if there are too many files, only a note."""
    try:
        collect(collector)
    except _TooManyError:
        return Patch({}, (_TOO_MANY,))
    return collector.build_patch()


def read_change(path: str, max_bytes: int, parent: int | None = None) -> FileChange | str:
    """Return a file's or a link's content, or the reason why it cannot be read.

    If `parent` is given, `path` is a name in that open folder.
    """
    try:
        mode = os.lstat(path, dir_fd=parent).st_mode
        if stat.S_ISLNK(mode):
            return FileChange(os.fsencode(os.readlink(path, dir_fd=parent)), link=True)
        if not stat.S_ISREG(mode):
            return "not a regular file"  # opening a device may have side effects
        with os.fdopen(os.open(path, _READ, dir_fd=parent), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "no longer a regular file"
            data = file.read(max_bytes + 1)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(data) > max_bytes:
        return f"change left out: larger than {max_bytes} bytes"
    return FileChange(data, executable=bool(mode & stat.S_IXUSR))
