"""Save and load the tokenizer of a run's recordings, stored once beside them.

Separate from `folder`, so that commands that only find recordings import no tokenizer.
"""

import functools
import hashlib
from pathlib import Path

from tugline.atomic import write_file
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import CaptureError
from tugline.recording.folder import tokenizer_name
from tugline.recording.records import Header


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> str:
    """Write the tokenizer's file into `folder` if missing; return its SHA-256 in hex."""
    text = tokenizer.to_json().encode()
    digest = hashlib.sha256(text).hexdigest()
    path = folder / tokenizer_name(digest)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    return digest


def load_tokenizer(recording: Path, header: Header, other: Path | None = None) -> Tokenizer | None:
    """Load the tokenizer of a recording: `other` if given, else the file beside it, else None.

    Raises `CaptureError` if the file beside the recording is not the one named in the header.
    """
    if other is not None:
        return _load(other, "")
    path = recording.parent / tokenizer_name(header.tokenizer)
    if not header.tokenizer or not path.exists():
        return None
    if hashlib.sha256(path.read_bytes()).hexdigest() != header.tokenizer:
        msg = f"{path} is not the tokenizer of {recording}: its digest differs"
        raise CaptureError(msg)
    return _load(path, header.tokenizer)


@functools.lru_cache(maxsize=2)
def _load(path: Path, _digest: str) -> Tokenizer:
    return Tokenizer.load(path)
