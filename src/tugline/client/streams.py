"""Streams of results, groups, events and log output, resumed after every break.

Each stream asks again from its last position when a connection breaks or the server restarts;
within one iteration nothing is lost and nothing comes twice.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from html import escape
from typing import NamedTuple, Self

import aiohttp
import msgspec
from msgspec.structs import asdict, replace

from tugline import log, protocol
from tugline.client.transport import BROKEN, Transport, is_transient, quote_id
from tugline.errors import ServerError
from tugline.recording.trajectories import unpack
from tugline.types import TERMINAL, Trajectory

_FRAMES = "application/x-msgpack"
_log = log.get("client")
_GROUP_LIMIT = 100
"""Most results in a page of groups: all results of a group are in memory at once."""


class Attempts:
    """Attempts at one stream, each of which resumes where the last one broke off.

    ``while not attempts.done: async with attempts: ...``, where the body sets `done` at the end of
    the stream. Raises a `ServerError` that no retry can resolve, or the last one at the deadline.
    """

    def __init__(self, http: Transport, name: str) -> None:
        self.done = False
        self._http, self._name = http, name
        self._budget = http.start_budget()
        self.renew = self._budget.renew

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is None and self.done:
            return True
        if error is None:
            error = ServerError(f"{self._http.url} ended {self._name}; it is shutting down")
        elif isinstance(error, BROKEN):
            error = self._http.make_unreachable_error(error)
        elif not (isinstance(error, ServerError) and is_transient(error)):
            return False
        await self._budget.wait(error)
        return True


# --------------------------------------------------------------------------- events and logs
async def stream_events(
    http: Transport, after: int | None, task: str | None
) -> AsyncGenerator[protocol.Event, None]:
    """Events after a position, or from now on. Raises `ServerError` at the deadline."""
    if after is None:
        after = (await http.ask("GET", "/v1/status", protocol.Counts)).position
    attempts = Attempts(http, "the stream of events")
    while not attempts.done:
        headers = {"Last-Event-ID": str(after)}
        query = {"task": task}
        async with (
            attempts,
            http.stream("/v1/events", "text/event-stream", query=query, headers=headers) as answer,
        ):
            async for line in answer.content:
                attempts.renew()
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:], type=protocol.Event)
                    yield event
                    after = event.position
                    attempts.renew()


async def stream_log(
    http: Transport, session: str, *, tail: int | None, follow: bool
) -> AsyncGenerator[bytes, None]:
    """The log of a session, from its beginning or its last `tail` bytes; to its end if followed.

    A stream also ends when its server stops. So the log is complete when a request that began after
    the end of the session brings nothing more.
    """
    path, attempts = f"/v1/sessions/{quote_id(session)}/log", Attempts(http, "the log")
    offset: int | None = None if tail else 0
    complete = not follow
    while not attempts.done:
        progress = False
        query = {"offset": offset, "tail": tail if offset is None else None, "follow": not complete}
        async with attempts:
            async with http.stream(path, "text/plain", query=query) as answer:
                offset = int(answer.headers.get("tugline-offset", offset or 0))
                async for chunk in answer.content.iter_any():
                    yield chunk
                    offset += len(chunk)
                    progress = True
                    attempts.renew()
            attempts.done = complete and not progress
            complete = complete or await _is_final(http, session)
            attempts.renew()


async def _is_final(http: Transport, session: str) -> bool:
    view = await http.ask("GET", f"/v1/sessions/{quote_id(session)}", protocol.SessionView)
    return view.status in TERMINAL


# --------------------------------------------------------------------------- results and groups
class Result:
    """The result of one session; its trajectory is decoded on first access."""

    def __init__(self, view: protocol.ResultView, packed: bytes) -> None:
        self.view = view
        self.packed = packed
        """`types.encode`, zstd-compressed; empty for a session that never ran.

        Also empty, beside ``view.bytes`` > 0, if the server has lost it.
        """

    @property
    def cursor(self) -> int:
        """Position to acknowledge once this result, and all before it, are stored."""
        return self.view.position

    @cached_property
    def trajectory(self) -> Trajectory | None:
        """The session's trajectory; None for one that never ran, or was lost."""
        return unpack(self.packed) if self.packed else None

    def __repr__(self) -> str:
        view = self.view
        return f"<Result {view.session} {view.status} reward={view.reward} at {view.position}>"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        view = self.view
        tokens = f"{view.trained} of {view.sampled} sampled tokens are trained"
        failure = view.failure.message if view.failure else ""
        cells = (view.session, view.status, f"reward {view.reward}", tokens, failure)
        return f"<table><tr><td>{'<td>'.join(map(escape, cells))}</table>"


class GroupResults(NamedTuple):
    """All results of a released task."""

    view: protocol.TaskView
    """Its `missing` names the samples without a usable result."""
    results: tuple[Result, ...]
    """By sample."""

    @property
    def cursor(self) -> int:
        """Position to acknowledge once this group, and all before it, are stored."""
        return self.view.released or 0


async def stream_results(
    http: Transport, query: protocol.ResultQuery
) -> AsyncGenerator[Result | GroupResults | None, None]:
    """Results, or groups, from `query.after` on; None at the end of each page.

    The server sends frames: a page (`Results`), then the trajectory of each of its items. After a
    break the last page is requested again, and items already yielded are skipped. Raises
    `ServerError` at the deadline.
    """
    after, yielded = await _find_start(http, query), 0
    attempts = Attempts(http, "the stream of results")
    while not attempts.done:
        async with attempts:
            async with aclosing(_stream_pages(http, query, after)) as pages:
                async for page, item in pages:
                    attempts.renew()
                    if item is None:
                        after = page.cursor
                        yield None
                    elif item.cursor > yielded:
                        yield item
                        yielded = item.cursor
                        attempts.renew()
            attempts.done = not query.follow and not await _has_more(http, query, after)


async def _find_start(http: Transport, query: protocol.ResultQuery) -> int:
    """The consumer's position; requested once, so that a break cannot return to it."""
    if query.after is not None:
        return query.after
    if query.consumer is None:
        return 0
    consumers = await http.ask("GET", "/v1/consumers", list[protocol.Consumer])
    return next((each.acked for each in consumers if each.name == query.consumer), 0)


async def _has_more(http: Transport, query: protocol.ResultQuery, after: int) -> bool:
    """Whether a stream ended too early, because its server stopped."""
    parameters = asdict(replace(query, after=after, limit=1))
    page = await http.ask("GET", "/v1/results", protocol.Results, query=parameters)
    return bool(page.items or page.groups)


async def _stream_pages(
    http: Transport, query: protocol.ResultQuery, after: int
) -> AsyncGenerator[tuple[protocol.Results, Result | GroupResults | None], None]:
    """Each item with its page, and None after the last one of a page."""
    parameters = asdict(replace(query, after=after, limit=_GROUP_LIMIT))
    async with http.stream("/v1/results", _FRAMES, query=parameters) as answer:
        while (head := await _read_frame(answer, may_end=True)) is not None:
            page = msgspec.msgpack.decode(head, type=protocol.Results)
            groups = {group.id: group for group in page.groups}
            gathered: dict[str, list[Result]] = {name: [] for name in groups}
            for view in page.items:
                result = Result(view, await _read_frame(answer) or b"")
                if view.bytes and not result.packed:
                    _log.error("the server has lost a trajectory", session=view.session)
                if not query.groups:
                    yield page, result
                else:
                    gathered[view.task].append(result)
            for name, group in groups.items():
                yield page, GroupResults(group, tuple(gathered.pop(name)))
            yield page, None


async def _read_frame(answer: aiohttp.ClientResponse, *, may_end: bool = False) -> bytes | None:
    """The next frame; None at the end of the stream, if it `may_end` here."""
    if may_end and (answer.content.at_eof() or not (first := await answer.content.read(1))):
        return None
    start = first if may_end else b""
    length = int.from_bytes(start + await answer.content.readexactly(4 - len(start)), "big")
    return await answer.content.readexactly(length)
