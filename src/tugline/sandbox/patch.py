"""Collect the files that an agent changed, without git and without trusting them.

The workdir is hostile: links that point out of it, pipes that never end, names that are no text,
trees of any depth. Only regular files are opened, no link is followed (its target is its content),
everything is limited, and what was left out is reported in `Patch.notes`. Reading the upper layer
of an overlay is in `workspace.overlay`.
"""

import os
import stat
from collections.abc import Callable, Iterator

import msgspec

SKIPPED = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".git"})
"""Folders that programs leave behind; not part of anybody's work."""
INSTALLED = frozenset({"node_modules", ".venv", ".tox", ".nox"})
"""Folders of installed programs, left out with a note."""
IGNORED = SKIPPED | INSTALLED

_MAX_NOTES = 20
_TOO_MANY = "more files than are looked at; no change is taken along"
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
"""A pipe must not hold us, nor a link lead us out."""


class PatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many changes a patch may hold."""

    files: int = 500
    """New and changed files; removed ones count among those looked at."""
    seen_files: int = 20_000
    """Files looked at; of a workspace with a base, only those that were touched."""
    file_bytes: int = 1 << 20
    """Size of one file."""
    total_bytes: int = 16 << 20
    """Size of all together."""


class FileChange(msgspec.Struct, frozen=True):
    """New content of a path."""

    data: bytes
    """Content of a regular file, or the target of a symbolic link."""
    executable: bool = False
    link: bool = False

    @property
    def text(self) -> str | None:
        """The content of a regular file, if it is UTF-8."""
        try:
            return None if self.link else self.data.decode()
        except UnicodeDecodeError:
            return None


class Patch(msgspec.Struct, frozen=True):
    """Changed files (None for a removed one) by relative POSIX path, and what was left out."""

    files: dict[str, FileChange | None] = {}
    notes: tuple[str, ...] = ()


class _TooManyError(Exception):
    """There are more files than the limits allow to look at."""


class ChangeCollector:
    """Collects changes within `limits` and notes what it leaves out.

    `before` returns the old file or link at a path, or None.
    """

    def __init__(self, limits: PatchLimits, before: Callable[[str], FileChange | None]) -> None:
        self.limits = limits
        self._before = before
        self._changed: dict[str, FileChange | None] = {}
        self._notes: dict[str, None] = {}
        self._seen = self._bytes = 0

    def count(self) -> None:
        """Count a file that is looked at."""
        self._seen += 1
        if self._seen > self.limits.seen_files:
            raise _TooManyError

    def note(self, path: str, reason: str) -> None:
        """Note that `path` is left out, and therefore taken for unchanged."""
        self._notes[f"{path if path.isprintable() else ascii(path)[:200]}: {reason}"] = None

    def add_removed(self, path: str) -> None:
        """Add a path with no file any more."""
        self.count()
        if (reason := unusable_name(path)) is None:
            self._changed[path] = None
        else:
            self.note(path, f"{reason}, its removal left out")

    def add_entry(self, path: str, entry: os.DirEntry[str]) -> None:
        """Add the file that is at `path` now."""
        change = read_change(entry.path, self.limits.file_bytes)
        if isinstance(change, FileChange):
            self.add(path, change)
        else:
            self.keep(path)
            self.note(path, change)

    def keep(self, path: str) -> None:
        """Take back what was added for a path: it is as before."""
        self._changed.pop(path, None)

    def add(self, path: str, change: FileChange) -> None:
        """Add new content, unless it is the old."""
        self.keep(path)
        if change == self._before(path):
            return
        self._bytes += len(change.data)
        if self._bytes > self.limits.total_bytes:
            self._bytes -= len(change.data)
            self.note(path, f"past {self.limits.total_bytes} bytes in all, change left out")
            return
        self._changed[path] = change
        new = (each is not None for each in self._changed.values())
        if len(self._changed) > self.limits.files and sum(new) > self.limits.files:
            raise _TooManyError

    def list_folder(self, prefix: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield paths and entries of a folder, sorted; unusable names are noted."""
        try:
            with os.scandir(folder) as listing:
                found = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self.note(prefix, f"cannot be listed ({error.strerror})")
            return
        for entry in found:
            path = f"{prefix}{entry.name}"
            if (reason := unusable_name(path)) is None:
                yield path, entry
            else:
                self.count()
                self.note(path, reason)

    def should_enter(self, path: str, name: str) -> bool:
        """Return whether a folder is searched."""
        if name in INSTALLED:
            self.note(path, "a folder of installed programs, left out")
        return name not in IGNORED

    def build_patch(self) -> Patch:
        """Return all changes, removals first: applied in order they remove nothing that is new."""
        removed: dict[str, FileChange | None] = {
            path: None for path, change in self._changed.items() if change is None
        }
        notes, rest = list(self._notes), len(self._notes) - _MAX_NOTES
        more = (f"and {rest} more notes",) if rest > 0 else ()
        return Patch(removed | self._changed, (*notes[:_MAX_NOTES], *more))


def unusable_name(path: str) -> str | None:
    """Return why no sandbox could be given a file of that name, if so."""
    if not path.isprintable():
        return "a name with control or undecodable characters"
    return "a name with a backslash" if "\\" in path else None


def collect_patch(collector: ChangeCollector, collect: Callable[[ChangeCollector], None]) -> Patch:
    """Return what `collect` finds; only a note if there are too many files."""
    try:
        collect(collector)
    except _TooManyError:
        return Patch({}, (_TOO_MANY,))
    return collector.build_patch()


def read_change(path: str, max_bytes: int, parent: int | None = None) -> FileChange | str:
    """Return a file's or a link's content, or the reason why it cannot be read.

    `parent` is an open folder that `path` is a name in.
    """
    try:
        mode = os.lstat(path, dir_fd=parent).st_mode
        if stat.S_ISLNK(mode):
            return FileChange(os.fsencode(os.readlink(path, dir_fd=parent)), link=True)
        if not stat.S_ISREG(mode):
            return "not a regular file"  # not even opened: a device may do something then
        with os.fdopen(os.open(path, _READ, dir_fd=parent), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return "not a regular file any more"
            data = file.read(max_bytes + 1)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(data) > max_bytes:
        return f"larger than {max_bytes} bytes, change left out"
    return FileChange(data, executable=bool(mode & stat.S_IXUSR))
