"""Atomic replacement of files, and durable lines."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_file(path: Path, data: bytes, mode: int = 0o644, *, draft: Path | None = None) -> None:
    """Replace a file atomically; the new file is created with `mode`. Raises `OSError`.

    The data is on disk when this returns. A crash leaves the old or the new file, and perhaps the
    temporary file `draft`, by default ``NAME.part``. Concurrent writers need different drafts.
    """
    draft = draft or path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:  # such as a full disk: free the space of the draft
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def read_or_make(path: Path, make: Callable[[], str], mode: int = 0o644) -> str:
    """Return the text of a file, which is made first if it does not exist. Raises `OSError`."""
    if not path.exists():
        write_file(path, make().encode(), mode)
    return path.read_text("utf-8")


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file; it is on disk when this returns. Raises `OSError`."""
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, if it exists; a torn last one is cut off. Raises `OSError`."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    return whole.splitlines()


def flush_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
