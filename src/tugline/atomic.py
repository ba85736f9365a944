"""Files that are replaced whole."""

import os
from pathlib import Path


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file that has `mode` from its creation on. Raises `OSError`.

    It is on disk when this returns; a crash leaves the old file or the new one, and perhaps
    ``NAME.part``. One process at a time may write the same file.
    """
    draft = path.with_name(f"{path.name}.part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
