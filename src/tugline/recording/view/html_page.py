"""One self-contained HTML file that shows a session: no network, no other file.

The page's parts are files in ``page/``. Its data are one block: gzip of a length, the view as JSON
and the arrays, in base64, so that no text of a model can end it or be taken for markup. Of each
trace only the tokens that its parent does not have are stored, so the file grows with the session's
tokens, not with turns times tokens (I7).

A run is a folder of such files, with a table of its sessions.
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
"""Longest URL of an image that is included in the page, in characters."""
_MAX_RUN = 500_000_000
"""Bytes of all pages of a run: a folder that can still be sent to somebody."""
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
    name = view.header.session.id if view.header else view.recording
    data = base64.b64encode(_encode_block(session, texts)).decode()
    return _fill("page.html", title=html.escape(f"{name} - Tugline"), data=data)


def write_run(
    root: Path, out: Path, load: Callable[[Path], tuple[ViewedSession, TokenText]]
) -> str:
    """Write the pages of the recordings below `root`, and a table, into `out`; says what it wrote.

    The table has every session, of several attempts the last. Without a page, as its row says, is
    one that cannot be read, and one that comes when the pages have `_MAX_RUN` already.
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
            page, cells[-1] = b"", f"no page: the others have {size:,} bytes. {cells[-1]}"
        title = html.escape(parse_name(path)[0])
        if page:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            size, pages = size + (out / name).write_bytes(page), pages + 1
            title = f'<a href="{quote(name.as_posix())}">{title}</a>'
        rows.append("<tr><td>" + "<td>".join([title, *map(html.escape, cells)]))
    count = f"{len(rows):,} sessions, {pages:,} pages, {size / 1e6:,.1f} MB"
    count += f"; {len(rows) - pages:,} without a page, as the rows say" * (len(rows) > pages)
    title = html.escape(f"{root.resolve().name} - Tugline")
    index = _fill("run.html", title=title, count=count, rows="\n".join(rows))
    (out / "index.html").write_text(index, encoding="utf-8")
    return f"wrote {out / 'index.html'}: {count}"


def _describe(view: SessionView) -> list[str]:
    """The cells of a run's table, after the session."""
    header, result, ledger = view.header, view.result, view.ledger
    failure = result.failure if result else None
    why = f"{failure.boundary}: {failure.message}" if failure else ""
    return [
        header.task.id if header else "",
        result.status.replace("_", " ") if result else "no result",
        f"{result.reward.value:g}" if result and result.reward else "",
        *(f"{n:,}" for n in (len(view.turns), ledger.sampled, ledger.trained)),
        f"{sum(result.seconds.values()):.1f}" if result else "",
        "; ".join(filter(None, (why, view.build_error, view.damage))),
    ]


def _fill(template: str, **parts: str) -> str:
    folder = files("tugline.recording.view") / "page"

    def fill(placeholder: re.Match[str]) -> str:
        part = placeholder[1]
        return parts[part] if part in parts else (folder / part).read_text(encoding="utf-8")

    return _PLACEHOLDER.sub(fill, (folder / template).read_text(encoding="utf-8"))


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
