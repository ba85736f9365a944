"""Where recordings are: by path, by folder, or by the id of a session in a run.

A run keeps its recordings in one folder as ``<session>.<epoch>.rec``. The tokenizer that their ids
belong to is kept there once, as ``tokenizer-<first 16 hex digits of its SHA-256>.json``.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tugline.chat.tokenizer import Tokenizer
from tugline.errors import CaptureError, UsageError
from tugline.recording.records import Header

RUNS = Path("runs")
"""Where commands look for a session that is named by its id."""
_NAME = re.compile(r"(?P<session>.+)\.(?P<epoch>\d+)\.rec")


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write the tokenizer's file into `folder` unless it is there; returns its SHA-256 in hex."""
    text = tokenizer.to_json().encode()
    digest = hashlib.sha256(text).hexdigest()
    path = folder / _tokenizer_name(digest)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(text)
        partial.replace(path)
    return digest


def tokenizer_of(recording: Path, header: Header, other: Path | None = None) -> Tokenizer | None:
    """The tokenizer of a recording: `other` if given, else the one beside it; None if neither.

    Raises `CaptureError` if the file beside it is not the one that the header names.
    """
    if other is not None:
        return Tokenizer.load(other)
    path = recording.parent / _tokenizer_name(header.tokenizer)
    if not header.tokenizer or not path.exists():
        return None
    if hashlib.sha256(path.read_bytes()).hexdigest() != header.tokenizer:
        msg = f"{path} is not the tokenizer that {recording} was made with; its digest differs"
        raise CaptureError(msg)
    return Tokenizer.load(path)


def _tokenizer_name(digest: str) -> str:
    return f"tokenizer-{digest[:16]}.json"


def list_recordings(where: Path) -> list[Path]:
    """`where` if it is a file, else every recording below it. Raises `UsageError` on none."""
    if where.is_file():
        return [where]
    found = sorted(where.rglob("*.rec")) if where.is_dir() else []
    if not found:
        what = "holds no recording (*.rec)" if where.is_dir() else "does not exist"
        msg = f"{where} {what}; give a recording file or a folder with some"
        raise UsageError(msg)
    return found


def locate(name: str, runs: Path = RUNS) -> Path:
    """The recording that `name` is the path of, or the last attempt of the session of this id.

    Looks below `runs` for an id; of several runs the one written to last counts. Raises
    `UsageError`.
    """
    path = Path(name)
    if path.is_file():
        return path
    found = []
    for one in runs.rglob("*.rec") if runs.is_dir() else ():
        parts = _NAME.fullmatch(one.name)
        if parts is not None and parts["session"] == name:
            found.append((one.parent.stat().st_mtime, str(one.parent), int(parts["epoch"]), one))
    if not found:
        msg = f"there is no recording {name!r}, and no session of that id below {runs}/"
        raise UsageError(msg)
    return max(found)[-1]
