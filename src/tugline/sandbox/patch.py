"""What an agent did to its files: compared without git, read without trust.

The workdir is hostile ground: links that point out of it, pipes that never end, names that are no
text, trees without bottom. Only regular files are opened, no link is followed (where it leads is
its content), everything is capped, and what was left out is said in `Patch.notes`, never passed
over. How a copy-on-write layer is read is in `layers.py`; the limits and the reading are these.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

import msgspec

from tugline.errors import SandboxError

SKIPPED = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".git"})
"""Folders that programs leave behind; not part of anybody's work."""
INSTALLED = frozenset({"node_modules", ".venv", ".tox", ".nox"})
"""Folders of other people's programs, left out with a note."""
PASSED = SKIPPED | INSTALLED

_MAX_NOTES = 20
_BLOCK = 1 << 20
_FLOOD = "more files than are looked at; no change is taken along"


class PatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what an agent did is taken along."""

    files: int = 500
    """Files that are new or changed; files that are gone count among those looked at."""
    seen_files: int = 20_000
    """Files looked at; of a workspace with a base, only what was touched is."""
    file_bytes: int = 1 << 20
    """Size of one file."""
    total_bytes: int = 16 << 20
    """Size of all together."""
    diff_lines: int = 2000
    """Length of a file, before or after, that is shown in a diff."""


class FileChange(msgspec.Struct, frozen=True):
    """What stands at a path now."""

    data: bytes
    """Content of a regular file, or where a symbolic link leads."""
    executable: bool = False
    link: bool = False

    @property
    def text(self) -> str | None:
        """The content, if it is that of a regular file and UTF-8."""
        try:
            return None if self.link else self.data.decode()
        except UnicodeDecodeError:
            return None


class Patch(msgspec.Struct, frozen=True):
    """Changed files (None for one that is gone) by relative POSIX path, and what was left out."""

    files: dict[str, FileChange | None] = {}
    notes: tuple[str, ...] = ()


class _FloodError(Exception):
    """There is more than the limits allow to look at."""


class Gatherer:
    """Collects changes within `limits` and notes what it leaves out.

    `before` tells what stood at a path: a file or link, or None.
    """

    def __init__(self, limits: PatchLimits, before: Callable[[str], FileChange | None]) -> None:
        self.limits = limits
        self._before = before
        self._changed: dict[str, FileChange | None] = {}
        self._notes: dict[str, None] = {}
        self._seen = self._bytes = 0

    def look(self) -> None:
        """Count a file that is looked at."""
        self._seen += 1
        if self._seen > self.limits.seen_files:
            raise _FloodError

    def note(self, path: str, why: str) -> None:
        """Say that what is at `path` is left out; it is then taken for unchanged."""
        self._notes[f"{path if path.isprintable() else ascii(path)[:200]}: {why}"] = None

    def gone(self, path: str) -> None:
        """Nothing is at `path` any more, or something that is no file."""
        self.look()
        if (why := strange(path)) is None:
            self._changed[path] = None
        else:
            self.note(path, f"{why}, its removal left out")

    def file(self, path: str, found: os.DirEntry[str]) -> None:
        """What is at `path` now."""
        change = read(found.path, self.limits.file_bytes)
        if isinstance(change, FileChange):
            self.now(path, change)
        else:
            self._changed.pop(path, None)
            self.note(path, change)

    def now(self, path: str, change: FileChange) -> None:
        """The same, read already."""
        self._changed.pop(path, None)
        if change == self._before(path):
            return
        self._bytes += len(change.data)
        if self._bytes > self.limits.total_bytes:
            self._bytes -= len(change.data)
            self.note(path, f"past {self.limits.total_bytes} bytes in all, change left out")
            return
        self._changed[path] = change
        if len(self._changed) > self.limits.files and self._new() > self.limits.files:
            raise _FloodError

    def entries(self, prefix: str, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """What is in a folder, with paths, in order of name; names that are strange are noted."""
        try:
            with os.scandir(folder) as listing:
                found = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self.note(prefix, f"cannot be listed ({error.strerror})")
            return
        for entry in found:
            path = f"{prefix}{entry.name}"
            if (why := strange(path)) is None:
                yield path, entry
            else:
                self.look()
                self.note(path, why)

    def files(self, workdir: Path, *, counted: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """All files and links below, without the folders that are nobody's work."""
        stack = [("", str(workdir))]
        while stack:
            for path, entry in self.entries(*stack.pop()):
                if counted:
                    self.look()
                if not entry.is_dir(follow_symlinks=False):
                    yield path, entry
                elif self.enters(path, entry.name):
                    stack.append((f"{path}/", entry.path))

    def enters(self, path: str, name: str) -> bool:
        """Whether a folder is looked into."""
        if name in INSTALLED:
            self.note(path, "a folder of installed programs, left out")
        return name not in PASSED

    def patch(self) -> Patch:
        """All of it, what is gone first: applied in order it takes away nothing that is new."""
        gone: dict[str, FileChange | None] = {
            path: None for path, change in self._changed.items() if change is None
        }
        notes, rest = list(self._notes), len(self._notes) - _MAX_NOTES
        more = (f"and {rest} more notes",) if rest > 0 else ()
        return Patch(gone | self._changed, (*notes[:_MAX_NOTES], *more))

    def _new(self) -> int:
        return sum(change is not None for change in self._changed.values())


def strange(path: str) -> str | None:
    """Why a path is not taken along, if its name is such that no box could be given it."""
    if not path.isprintable():
        return "a name with control or undecodable characters"
    return "a name with a backslash" if "\\" in path else None


def gathered(gatherer: Gatherer, gather: Callable[[Gatherer], None]) -> Patch:
    """What `gather` finds; nothing but a note if it is too much."""
    try:
        gather(gatherer)
    except _FloodError:
        return Patch({}, (_FLOOD,))
    return gatherer.patch()


def compare(before: Mapping[str, str], workdir: Path, limits: PatchLimits | None = None) -> Patch:
    """The changes that turn `before` into what `workdir` holds now."""
    known = {str(PurePosixPath(path)): FileChange(text.encode()) for path, text in before.items()}

    def gather(gatherer: Gatherer) -> None:
        # A file that is too large or unreadable now stays as it was; it is not taken for deleted.
        seen = set()
        for path, found in gatherer.files(workdir, counted=True):
            seen.add(path)
            gatherer.file(path, found)
        for path in known.keys() - seen:
            if not set(path.split("/")) & PASSED:
                gatherer.gone(path)

    return gathered(Gatherer(limits or PatchLimits(), known.get), gather)


def diff_archives(before: BinaryIO, after: BinaryIO, limits: PatchLimits | None = None) -> Patch:
    """The changes between two tar archives of a workdir, for boxes on another machine.

    Both must be seekable; nothing is unpacked. Raises `SandboxError` for what is no archive.
    """
    # Of what was before only digests are kept: it may be a whole repository.
    known = {path: _digest(tar, member) for tar, path, member in _members(before)}

    def gather(gatherer: Gatherer) -> None:
        seen = set()
        for tar, path, member in _members(after):
            seen.add(path)
            if known.get(path) == _digest(tar, member):
                continue
            gatherer.look()
            change = _member(tar, member, gatherer.limits.file_bytes)
            if isinstance(change, FileChange):
                gatherer.now(path, change)
            else:
                gatherer.note(path, change)
        for path in known.keys() - seen:
            gatherer.gone(path)

    return gathered(Gatherer(limits or PatchLimits(), lambda _path: None), gather)


def read(path: str, most: int) -> FileChange | str:
    """A file's or a link's content; in words, why not."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return FileChange(os.fsencode(os.readlink(path)), link=True)  # noqa: PTH115 - bytes matter
        if not stat.S_ISREG(mode):
            return "not a regular file"
        # NONBLOCK and NOFOLLOW: a pipe must not hold us, nor a link lead us out.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(data) > most:
        return f"larger than {most} bytes, change left out"
    return FileChange(data, executable=bool(mode & stat.S_IXUSR))


def _members(archive: BinaryIO) -> Iterator[tuple[tarfile.TarFile, str, tarfile.TarInfo]]:
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            for member in tar:
                path = str(PurePosixPath(member.name))
                if not member.isdir() and not set(path.split("/")) & PASSED:
                    yield tar, path, member
    except (tarfile.TarError, OSError) as error:
        msg = f"what came back is no tar archive: {error}"
        raise SandboxError(msg) from error


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> FileChange | str:
    if ".." in member.name.split("/") or member.name.startswith("/"):
        return "a name that leaves its folder"
    if (why := strange(member.name)) is not None:
        return why
    if member.issym():
        return FileChange(os.fsencode(member.linkname), link=True)
    file = _content(tar, member)
    if file is None:
        return "not a regular file"
    data = file.read(most + 1)
    if len(data) > most:
        return f"larger than {most} bytes, change left out"
    return FileChange(data, executable=bool(member.mode & stat.S_IXUSR))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    try:
        return tar.extractfile(member) if member.isfile() or member.islnk() else None
    except KeyError:  # a hard link to what is not in it
        return None


def _digest(tar: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[str, bytes, bool]:
    """Of what kind it is, what it holds and whether it can be run."""
    digest = sha256(os.fsencode(member.linkname) if member.issym() else b"")
    file = _content(tar, member)
    while file is not None and (block := file.read(_BLOCK)):
        digest.update(block)
    kind = "file" if file is not None else str(member.type)
    return kind, digest.digest(), bool(member.mode & stat.S_IXUSR)
