"""What an agent did to its files: compared without git, read without trust.

The workdir is hostile ground: links that point out of it, pipes that never end, names that are no
text, trees without bottom. Only regular files are opened, no link is followed, everything is
capped, and what was left out is said in `Patch.notes`, never passed over.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

SKIPPED = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".git"})
"""Folders that programs leave behind; not part of anybody's work."""

_MAX_NOTES = 20


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a workdir is looked at."""

    files: int = 500
    """Changed files."""
    seen_files: int = 20_000
    """Files in all."""
    file_bytes: int = 1 << 20
    """Size of one file."""
    diff_lines: int = 2000
    """Length of a file, before or after, that is shown in a diff."""


class Change(msgspec.Struct, frozen=True):
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

    files: dict[str, Change | None] = {}
    notes: tuple[str, ...] = ()


def compare(before: Mapping[str, str], workdir: Path, caps: Caps | None = None) -> Patch:
    """The changes that turn `before` into what `workdir` holds now."""
    caps = caps or Caps()
    changed: dict[str, Change | None] = {}
    notes: list[str] = []
    seen: set[str] = set()
    for path, found in _walk(workdir, notes):
        change = _read(found, path, caps, notes)
        # A file that is too large or unreadable now stays as it was; it is not taken for deleted.
        seen.add(path)
        if len(seen) > caps.seen_files or len(changed) > caps.files:
            return Patch({}, ("more files than are looked at; no change is taken along",))
        if change is not None and before.get(path) != change.text:
            changed[path] = change
    gone = (path for path in before if path not in seen and not SKIPPED & set(path.split("/")))
    return Patch(changed | dict.fromkeys(gone), _short(notes))


def _walk(workdir: Path, notes: list[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files below `workdir` and their relative paths, in order of name within a folder."""
    stack = [("", str(workdir))]
    while stack:
        prefix, folder = stack.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            notes.append(f"{_shown(prefix)}: cannot be listed ({error.strerror})")
            continue
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if not path.isprintable():
                notes.append(f"{_shown(path)}: a name with control or undecodable characters")
            elif entry.is_symlink():
                notes.append(f"{path}: a symbolic link, not followed")
            elif entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED:
                    stack.append((f"{path}/", entry.path))
            else:
                yield path, entry


def _read(entry: os.DirEntry[str], path: str, caps: Caps, notes: list[str]) -> Change | None:
    try:
        # NONBLOCK and NOFOLLOW: a pipe must not hold us, nor a link lead us out.
        handle = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                notes.append(f"{path}: not a regular file")
                return None
            data = file.read(caps.file_bytes + 1)
    except OSError as error:
        notes.append(f"{path}: cannot be read ({error.strerror})")
        return None
    if len(data) > caps.file_bytes:
        notes.append(f"{path}: larger than {caps.file_bytes} bytes, change left out")
        return None
    return Change(data, executable=bool(mode & stat.S_IXUSR))


def _shown(path: str) -> str:
    return ascii(path)[:200]


def _short(notes: list[str]) -> tuple[str, ...]:
    rest = len(notes) - _MAX_NOTES
    return tuple(notes[:_MAX_NOTES]) + ((f"and {rest} more notes",) if rest > 0 else ())
