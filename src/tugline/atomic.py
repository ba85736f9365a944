"""Files that are replaced whole."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_file(path: Path, data: bytes, mode: int = 0o644, *, draft: Path | None = None) -> None:
    """Write a file that has `mode` from its creation on. Raises `OSError`.

    It is on disk when this returns; a crash leaves the old file or the new one, and perhaps the
    `draft`, by default ``NAME.part``. One writer at a time may use the same draft.
    """
    draft = draft or path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:  # as on a full disk, which it shall not keep full
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def read_or_make(path: Path, make: Callable[[], str], mode: int = 0o644) -> str:
    """The text of a file that is written once, by whoever needs it first. Raises `OSError`."""
    if not path.exists():
        write_file(path, make().encode(), mode)
    return path.read_text("utf-8")


def flush_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
