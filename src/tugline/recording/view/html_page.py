"""One self-contained HTML file that shows a session: no network, no other file.

The page's parts are files in ``page/``. Its data are one block: gzip of a length, the view as JSON
and the arrays, in base64, so that no text of a model can end it or be taken for markup. Of each
trace only the tokens that its parent does not have are stored, so the file grows with the session's
tokens, not with turns times tokens (I7).
"""

import base64
import gzip
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tugline.recording.file import read
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.recording.view.session_view import (
    SessionView,
    TokenText,
    ViewedSession,
    add_detail,
    view_session,
)
from tugline.types import Image, Message

_MAX_IMAGE_URL = 256 * 1024
"""Longest URL of an image that is included in the page, in characters."""
_NO_IDS = np.empty(0, np.int32)
_PLACEHOLDER = re.compile(r"\{\{ ([\w.]+) \}\}")
"""The title, the data or a file of ``page/``."""


class ArraySlice(msgspec.Struct, frozen=True):
    """Position of an array in the block, in items of four bytes."""

    start: int
    count: int


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON that precedes the arrays."""

    session: SessionView
    ids: list[int]
    """The distinct ids; arrays of tokens hold positions in this list."""
    texts: list[str | list[int]]
    """The text of each of them, or its bytes if they are only a part of a character."""
    tokens: list[ArraySlice]
    """For each trace: the tokens after those of its parent, int32."""
    logprobs: list[ArraySlice]
    """For each trace: float32, of its spans one after the other."""


def render_page(session: ViewedSession, texts: TokenText) -> str:
    """Render the page of a session."""
    view = session.view
    folder = files("tugline.recording.view") / "page"
    name = view.header.session.id if view.header else view.recording
    parts = {
        "title": html.escape(f"{name} - Tugline"),
        "data": base64.b64encode(_encode_block(session, texts)).decode(),
    }

    def fill(placeholder: re.Match[str]) -> str:
        part = placeholder[1]
        return parts[part] if part in parts else (folder / part).read_text(encoding="utf-8")

    return _PLACEHOLDER.sub(fill, (folder / "page.html").read_text(encoding="utf-8"))


def pack_recording(path: Path) -> bytes:
    """Read a recording, however far it got, and encode what a page shows of it."""
    recording = read(path, salvage=True)
    tokenizer = load_tokenizer(path, recording.header) if recording.header else None
    return _encode_block(view_session(Path(path.name), recording), TokenText(tokenizer))


def _encode_block(session: ViewedSession, texts: TokenText) -> bytes:
    traces = session.traces
    view = msgspec.structs.replace(
        session.view,
        turns=tuple(
            add_detail(turn, msgspec.structs.replace(call, messages=_slim(call.messages)))
            for turn, call in zip(session.view.turns, session.calls, strict=True)
        ),
    )
    arrays: list[np.ndarray[Any, Any]] = []
    ids = np.unique(np.concatenate([_NO_IDS, *(trace.ids for trace in traces)]))
    tokens: list[ArraySlice] = []
    logprobs: list[ArraySlice] = []
    at = 0
    for trace_view, trace in zip(view.traces, traces, strict=True):
        own = np.searchsorted(ids, trace.ids[trace_view.shared :]).astype(np.int32)
        sampled = [trace.logprobs[span.start : span.end] for span in trace.spans]
        values = np.concatenate([*sampled, np.empty(0, np.float32)]).astype(np.float32)
        for array, slices in ((own, tokens), (values, logprobs)):
            arrays.append(array)
            slices.append(ArraySlice(at, len(array)))
            at += len(array)
    data = PageData(
        session=view,
        ids=ids.tolist(),
        texts=[_decode_text(texts.spell(token)) for token in ids.tolist()],
        tokens=tokens,
        logprobs=logprobs,
    )
    text = msgspec.json.encode(data)
    text += b" " * (-len(text) % 4)
    block = len(text).to_bytes(4, "little") + text + b"".join(a.tobytes() for a in arrays)
    return gzip.compress(block, 6, mtime=0)


def _decode_text(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _slim(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages without images that are too large for a page."""
    return tuple(
        msgspec.structs.replace(message, images=tuple(map(_shorten, message.images)))
        for message in messages
    )


def _shorten(image: Image) -> Image:
    if len(image.url) <= _MAX_IMAGE_URL:
        return image
    kind = image.url[:40].split(";")[0]
    return msgspec.structs.replace(image, url=f"left out: {kind}, {len(image.url):,} characters")
