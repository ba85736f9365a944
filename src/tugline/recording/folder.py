"""Find recordings by path, by folder, or by the id of a session.

A run stores its recordings in one folder as ``<session>.<epoch>.rec``, and the tokenizer of their
ids there once, as ``tokenizer-<first 16 hex digits of its SHA-256>.json``. Each patch of its agents
is there once, as ``patch-<SHA-256>.zst``.
"""

import io
import tarfile
from pathlib import Path

from tugline.errors import UsageError
from tugline.types import Session

RUNS = Path("runs")
"""Folder in which commands search for a session id."""
PATCH = "patch-"
"""Beginning of the names of patches."""
_PATTERN = "*.rec"


def file_name(session: Session) -> str:
    """Return the file name of a session's recording."""
    return f"{session.id}.{session.epoch}.rec"


def parse_name(path: Path) -> tuple[str, int]:
    """Return the session and epoch in a recording's file name; epoch 0 if there is none."""
    session, _, epoch = path.stem.rpartition(".")
    return (session, int(epoch)) if session and epoch.isdecimal() else (path.stem, 0)


def pack_files(recording: Path, patch: str = "") -> bytes:
    """Pack a recording, the tokenizers beside it, and its patch, if any, as a tar archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        for path in (recording, *recording.parent.glob(tokenizer_name("*"))):
            files.add(path, path.name)
        stored = recording.parent / patch_name(patch)
        if patch and stored.exists():
            files.add(stored, stored.name)
    return archive.getvalue()


def tokenizer_name(digest: str) -> str:
    """Return the file name of the tokenizer with this digest, or a pattern for ``*``."""
    return f"tokenizer-{digest[:16]}.json"


def patch_name(digest: str) -> str:
    """Return the file name of the patch with this digest."""
    return f"{PATCH}{digest}.zst"


def list_recordings(where: Path) -> list[Path]:
    """Return a file `where`, or all recordings below a folder. Raises `UsageError` if none."""
    if where.is_file():
        return [where]
    paths = sorted(where.rglob(_PATTERN)) if where.is_dir() else []
    if not paths:
        what = f"contains no recordings ({_PATTERN})" if where.is_dir() else "does not exist"
        raise UsageError(f"{where} {what}; give a recording or a folder of recordings")
    return paths


def resolve(name: str) -> list[Path]:
    """Return the recordings of a file, a folder or a session id.

    An id is searched below ``runs``; the result is the last attempt in the most recently written
    run. Raises `UsageError`.
    """
    path = Path(name)
    if path.exists():
        return list_recordings(path)
    attempts = [
        (file.parent.stat().st_mtime, str(file.parent), parse_name(file)[1], file)
        for file in (RUNS.rglob(_PATTERN) if RUNS.is_dir() else ())
        if parse_name(file)[0] == name
    ]
    if not attempts:
        raise UsageError(f"{name!r} is neither a recording nor the id of a session in {RUNS}/")
    return [max(attempts)[-1]]
