"""Render a session as a self-contained HTML file: no network, no other file.

The page is ``pages/session.html``, which ``make console`` builds from the server's console. Its
data is one block: gzip of a length, the view as JSON and the arrays, in base64, so that no text of
a model can end the block or be parsed as markup. Only the tokens of a trace that its parent does
not have are stored, so the file grows with the session's tokens, not with turns times tokens (I7).

A run is a folder of such files, with a table of its sessions (``pages/run.html``).
"""

import base64
import gzip
import html
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from tugline.errors import CaptureError
from tugline.recording.file import read
from tugline.recording.folder import list_recordings, parse_name
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.recording.trajectories import find_superseded
from tugline.recording.view.session_view import (
    SessionView,
    TokenText,
    ViewedSession,
    add_detail,
    view_session,
)
from tugline.types import Image, Message

_MAX_IMAGE_URL = 256 * 1024
"""Longest URL of an included image, in characters."""
_MAX_RUN = 500_000_000
"""Maximum size of all pages of a run in bytes, so that the folder can be shared."""
_NO_IDS = np.empty(0, np.int32)
_PLACEHOLDER = re.compile(r"\{\{ (title|data|count|rows) \}\}")
"""Placeholder of a page."""


class ArraySlice(msgspec.Struct, frozen=True):
    """Position and length of an array in the block, in items of four bytes."""

    start: int
    count: int


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """JSON before the arrays."""

    session: SessionView
    ids: list[int]
    """Distinct ids; arrays of tokens hold indices of this list."""
    texts: list[str | list[int]]
    """Text of each id, or its bytes if they are not whole characters."""
    tokens: list[ArraySlice]
    """Tokens of each trace that its parent does not have, int32."""
    logprobs: list[ArraySlice]
    """Logprobs of each trace's spans, concatenated, float32."""


def render_page(session: ViewedSession, texts: TokenText) -> str:
    """Render the page of a session."""
    view = session.view
    name = view.header.session.id if view.header else view.recording
    data = base64.b64encode(_encode_block(session, texts)).decode()
    return _fill("session.html", title=html.escape(f"{name} - Tugline"), data=data)


def write_run(
    root: Path, out: Path, load: Callable[[Path], tuple[ViewedSession, TokenText]]
) -> str:
    """Write pages of the recordings below `root`, and a table, to `out`; return a summary line.

    The table lists the last attempt of every session. A session has no page, and a row that says
    so, if it cannot be read or if the pages would exceed `_MAX_RUN`.
    """
    rows, size, pages = [], 0, 0
    paths = list_recordings(root)
    out.mkdir(parents=True)
    for path in sorted(set(paths) - find_superseded(paths)):
        name = path.relative_to(root).with_suffix(".html")
        try:
            session, texts = load(path)
            cells, page = _describe(session.view), render_page(session, texts).encode()
        except CaptureError as error:
            cells, page = ["", "unreadable", *[""] * 5, str(error)], b""
        if size + len(page) > _MAX_RUN:
            page, cells[-1] = (
                b"",
                f"no page: the limit of {_MAX_RUN:,} bytes is reached. {cells[-1]}",
            )
        title = html.escape(parse_name(path)[0])
        if page:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            size, pages = size + (out / name).write_bytes(page), pages + 1
            title = f'<a href="{quote(name.as_posix())}">{title}</a>'
        rows.append("<tr><td>" + "<td>".join([title, *map(html.escape, cells)]))
    count = f"{len(rows):,} sessions, {pages:,} pages, {size / 1e6:,.1f} MB"
    count += f"; {len(rows) - pages:,} without a page, for the reason in their rows" * (
        len(rows) > pages
    )
    title = html.escape(f"{root.resolve().name} - Tugline")
    index = _fill("run.html", title=title, count=count, rows="\n".join(rows))
    (out / "index.html").write_text(index, encoding="utf-8")
    return f"wrote {out / 'index.html'}: {count}"


def _describe(view: SessionView) -> list[str]:
    """Return the cells of a session in the run's table, after its name."""
    header, result, ledger = view.header, view.result, view.ledger
    failure = result.failure if result else None
    reason = f"{failure.boundary}: {failure.message}" if failure else ""
    return [
        header.task.id if header else "",
        result.status.replace("_", " ") if result else "no result",
        f"{result.reward.value:g}" if result and result.reward else "",
        *(f"{n:,}" for n in (len(view.turns), ledger.sampled, ledger.trained)),
        f"{sum(result.seconds.values()):.1f}" if result else "",
        "; ".join(filter(None, (reason, view.build_error, view.damage))),
    ]


def _fill(page: str, **parts: str) -> str:
    text = (files("tugline.recording.view") / "pages" / page).read_text(encoding="utf-8")
    return _PLACEHOLDER.sub(lambda placeholder: parts[placeholder[1]], text)


def pack_recording(path: Path) -> bytes:
    """Read a recording, even if incomplete, and encode a page's data block."""
    recording = read(path, salvage=True)
    tokenizer = load_tokenizer(path, recording.header) if recording.header else None
    session = view_session(path, recording)
    view = msgspec.structs.replace(session.view, recording=path.name)
    return _encode_block(session._replace(view=view), TokenText(tokenizer))


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
    """Return the messages with oversized images replaced by a note."""
    return tuple(
        msgspec.structs.replace(message, images=tuple(map(_shorten, message.images)))
        for message in messages
    )


def _shorten(image: Image) -> Image:
    if len(image.url) <= _MAX_IMAGE_URL:
        return image
    kind = image.url[:40].split(";")[0]
    return msgspec.structs.replace(image, url=f"left out: {kind}, {len(image.url):,} characters")
