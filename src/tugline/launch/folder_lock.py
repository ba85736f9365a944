"""Lock of a folder that one process may use at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from tugline.errors import UsageError


@contextlib.contextmanager
def folder_lock(folder: Path, *, instead: str) -> Iterator[None]:
    """Create and lock `folder`. Raises `UsageError` with the advice `instead`."""
    lock = FileLock(folder / ".lock", mode=0o600, preserve_lock_file=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        msg = f"another process is running in {folder}; wait for it or {instead}"
        raise UsageError(msg) from error
    except OSError as error:
        raise UsageError(f"cannot write in {folder}: {error.strerror}; {instead}") from error
    try:
        yield
    finally:
        lock.release()
