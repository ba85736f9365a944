"""One HTML file that shows a session: no network, no other file, nothing to install.

The page's parts are files of their own in ``page/``. Its data are one block: gzip of a length, the
story as JSON and the arrays, in base64, so that no word of a model can end it or be taken for
markup. Of each trace only what its parent does not have is stored, so the file grows with the
session's tokens, not with turns times tokens (I7).
"""

from __future__ import annotations

import base64
import gzip
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np

from tugline.recording.view.session_view import Told, detailed
from tugline.recording.view.texts import Texts
from tugline.types import Image, Message, Trace

_SCRIPTS = (
    "data",
    "virtual",
    "tokens",
    "map",
    "timeline",
    "lists",
    "conversation",
    "search",
    "app",
)
"""Files of ``page/`` in the order in which they are run."""
_PICTURE = 256 * 1024
"""Characters of a picture's URL that are taken into the page."""
_NONE = np.empty(0, np.int32)
_PLACE = re.compile(r"\{\{ (\w+) \}\}")


class Piece(msgspec.Struct, frozen=True):
    """Where in the block an array is: its first item and how many, in items of four bytes."""

    start: int
    count: int


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What the scripts get beside the arrays."""

    story: Any
    ids: list[int]
    """The ids that occur; arrays of tokens hold places in this list."""
    texts: list[str | list[int]]
    """Of each of them: its text, or its bytes where they are only a part of a character."""
    tokens: list[Piece]
    """Of each trace: the tokens after those that its parent has, int32."""
    logprobs: list[Piece]
    """Of each trace: float32, of its spans one after the other."""


def document(told: Told, texts: Texts) -> str:
    """The page of a session, as one text."""
    story = msgspec.structs.replace(
        told.story,
        turns=tuple(
            detailed(turn, msgspec.structs.replace(call, messages=_slim(call.messages)))
            for turn, call in zip(told.story.turns, told.calls, strict=True)
        ),
    )
    folder, header = files("tugline.recording.view") / "page", told.story.header
    parts = {
        "title": html.escape(f"{header.session.id if header else told.story.recording} - Tugline"),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join(
            (folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS
        ),
        "data": base64.b64encode(_block(story, told, texts)).decode(),
    }
    page = (folder / "page.html").read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: parts[place[1]], page)


def _block(story: object, told: Told, texts: Texts) -> bytes:
    arrays: list[np.ndarray[Any, Any]] = []
    ids = np.unique(np.concatenate([_NONE, *(trace.ids for trace in told.traces)]))
    tokens: list[Piece] = []
    logprobs: list[Piece] = []
    at = 0
    for view, trace in zip(told.story.traces, told.traces, strict=True):
        own = np.searchsorted(ids, trace.ids[view.shared :]).astype(np.int32)
        for array, pieces in ((own, tokens), (_sampled(trace), logprobs)):
            arrays.append(array)
            pieces.append(Piece(at, len(array)))
            at += len(array)
    page = Page(
        story=story,
        ids=ids.tolist(),
        texts=[_spelled(texts.spell(token)) for token in ids.tolist()],
        tokens=tokens,
        logprobs=logprobs,
    )
    text = msgspec.json.encode(page)
    text += b" " * (-len(text) % 4)
    block = len(text).to_bytes(4, "little") + text + b"".join(a.tobytes() for a in arrays)
    return gzip.compress(block, 6, mtime=0)


def _sampled(trace: Trace) -> np.ndarray[Any, Any]:
    found = [trace.logprobs[span.start : span.end] for span in trace.spans]
    return np.concatenate([*found, np.empty(0, np.float32)]).astype(np.float32)


def _spelled(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _slim(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages without pictures that are too large for a page; the recording has them."""
    return tuple(
        msgspec.structs.replace(message, images=tuple(map(_small, message.images)))
        for message in messages
    )


def _small(image: Image) -> Image:
    if len(image.url) <= _PICTURE:
        return image
    kind = image.url[:40].split(";")[0]
    return msgspec.structs.replace(image, url=f"left out: {kind}, {len(image.url):,} characters")
