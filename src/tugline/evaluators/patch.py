"""What an agent did to its files: compared without git, read without trust.

The workdir is hostile ground: links that point out of it, pipes that never end, names that are no
text, trees without bottom. Only regular files are opened, no link is followed, everything is
capped, and what was left out is said in `Patch.notes`, never passed over.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

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


class Patch(msgspec.Struct, frozen=True):
    """Changed files (new text, or None for one that is gone) and what could not be taken along."""

    files: dict[str, str | None]
    notes: tuple[str, ...] = ()


def compare(before: Mapping[str, str], workdir: Path, caps: Caps | None = None) -> Patch:
    """The changes that turn `before` into what `workdir` holds now."""
    caps = caps or Caps()
    changed: dict[str, str | None] = {}
    notes: list[str] = []
    seen: set[str] = set()
    for path, found in _walk(workdir, notes):
        text = _read(found, path, caps, notes)
        # A file that is too large or unreadable now stays as it was; it is not taken for deleted.
        seen.add(path)
        if len(seen) > caps.seen_files or len(changed) > caps.files:
            return Patch({}, ("more files than are looked at; no change is taken along",))
        if text is not None and before.get(path) != text:
            changed[path] = text
    gone = (path for path in before if path not in seen and not SKIPPED & set(path.split("/")))
    return Patch(changed | dict.fromkeys(gone), _short(notes))


def unified(before: Mapping[str, str], patch: Patch, caps: Caps | None = None) -> str:
    """The patch as people read it, ending with its notes."""
    caps = caps or Caps()
    parts: list[str] = []
    for path, text in sorted(patch.files.items()):
        old = before.get(path, "").splitlines(keepends=True)
        new = (text or "").splitlines(keepends=True)
        if max(len(old), len(new)) > caps.diff_lines:
            parts.append(f"{path}: {len(old)} lines became {len(new)}; too long to show\n")
            continue
        names = (
            "/dev/null" if path not in before else f"a/{path}",
            "/dev/null" if text is None else f"b/{path}",
        )
        parts += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, *names)
        ]
    return "".join(parts) + "".join(f"# {note}\n" for note in patch.notes)


def applied(
    before: Mapping[str, str], patch: Patch, trusted: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """`before` with the patch, and `trusted` over all; also the paths that had to give way.

    A path gives way when it would stand where a trusted file's folder must be, or the reverse.
    """
    result = dict(trusted)
    gave_way: list[str] = []
    folders = {str(parent) for path in trusted for parent in PurePosixPath(path).parents}
    for path, text in {**before, **patch.files}.items():
        if text is None or path in trusted:
            continue
        if path in folders or any(str(up) in result for up in PurePosixPath(path).parents):
            gave_way.append(path)
            continue
        result[path] = text
        folders |= {str(parent) for parent in PurePosixPath(path).parents}
    return result, tuple(gave_way)


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


def _read(entry: os.DirEntry[str], path: str, caps: Caps, notes: list[str]) -> str | None:
    try:
        # NONBLOCK and NOFOLLOW: a pipe must not hold us, nor a link lead us out.
        handle = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                notes.append(f"{path}: not a regular file")
                return None
            data = file.read(caps.file_bytes + 1)
    except OSError as error:
        notes.append(f"{path}: cannot be read ({error.strerror})")
        return None
    if len(data) > caps.file_bytes:
        notes.append(f"{path}: larger than {caps.file_bytes} bytes, change left out")
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        notes.append(f"{path}: binary, change left out")
        return None


def _shown(path: str) -> str:
    return ascii(path)[:200]


def _short(notes: list[str]) -> tuple[str, ...]:
    rest = len(notes) - _MAX_NOTES
    return tuple(notes[:_MAX_NOTES]) + ((f"and {rest} more notes",) if rest > 0 else ())
