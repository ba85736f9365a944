"""What an agent changed: the files that it left, as bytes to store and as a diff to read."""

import difflib
from collections.abc import Mapping

import msgspec

from tugline.errors import CaptureError

_MAX_CHARACTERS = 1 << 20
"""Maximum length of a diff; a file's diff is completed."""
_MAX_LINES = 2000
"""Maximum lines of a file, before or after, for showing its diff."""


class FileChange(msgspec.Struct, frozen=True):
    """New content of a path."""

    data: bytes
    """Content of a regular file, or the target of a symbolic link; empty for a folder."""
    executable: bool = False
    link: bool = False
    folder: bool = False
    """Whether this is a folder without content."""

    @property
    def text(self) -> str | None:
        """The content of a regular file, if it is UTF-8."""
        try:
            return None if self.link or self.folder else self.data.decode()
        except UnicodeDecodeError:
            return None


class Patch(msgspec.Struct, frozen=True):
    """Changed files (None if removed) by relative POSIX path, and notes on omitted changes."""

    files: dict[str, FileChange | None] = {}
    notes: tuple[str, ...] = ()


def pack_patch(patch: Patch) -> bytes:
    """Encode a patch as bytes to store."""
    return msgspec.msgpack.encode(patch)


def unpack_patch(data: bytes) -> Patch:
    """Decode the bytes of a stored patch. Raises `CaptureError`."""
    try:
        return msgspec.msgpack.decode(data, type=Patch)
    except msgspec.DecodeError as error:
        raise CaptureError(f"a stored patch cannot be decoded: {error}") from error


def format_path(path: str) -> str:
    """Return a path as text of one line; one with a control character is quoted, with escapes."""
    return path if path.isprintable() else ascii(path)


def format_patch(before: Mapping[str, str], patch: Patch) -> str:
    """Return a unified diff of a patch, followed by its notes."""
    parts: list[str] = []
    size = 0
    for path, change in sorted(patch.files.items()):
        text = "" if change is None else change.text
        shown = format_path(path)
        if text is None:
            kind = "an empty folder" if change is not None and change.folder else "not text"
            parts.append(f"{shown}: {kind}\n")
            continue
        if size > _MAX_CHARACTERS:
            parts.append(f"{shown}: not shown, because the diff is too long\n")
            continue
        old = before.get(path, "").splitlines(keepends=True)
        new = text.splitlines(keepends=True)
        if max(len(old), len(new)) > _MAX_LINES:
            parts.append(f"{shown}: {len(old)} lines became {len(new)}; too long to show\n")
            continue
        names = (
            "/dev/null" if path not in before else format_path(f"a/{path}"),
            "/dev/null" if change is None else format_path(f"b/{path}"),
        )
        diff = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, *names)
        )
        parts.append(diff)
        size += len(diff)
    return "".join(parts) + "".join(f"# {note}\n" for note in patch.notes)
