"""Streams of results, groups, events and log output, which resume after a lost connection.

Results and events are read page by page, with a long poll for new items; a log is read from the
last offset. An iteration yields each item exactly once.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import cached_property
from html import escape
from typing import NamedTuple, TypeVar

from msgspec.structs import asdict, replace

from tugline import log, protocol
from tugline.client.transport import BROKEN, RetryBudget, Transport, is_transient, quote_id
from tugline.errors import Conflict, Missing, ServerError, UsageError
from tugline.recording.trajectories import unpack
from tugline.types import TERMINAL, Trajectory

_WAIT_S = 30.0
"""Seconds that the server waits for new items before it returns an empty page."""
_AT_ONCE = 16
"""Results per page, unless a group has more, and trajectories requested concurrently."""
ACK_EVERY_S = 1.0
"""Interval of acknowledgements while results are read without waiting."""
_log = log.get("client")

Acknowledge = Callable[[str, int], Awaitable[object]]
"""Function that acknowledges the results of a consumer up to a position."""


# --------------------------------------------------------------------------- events and logs
async def stream_events(
    http: Transport, after: int | None, task: str | None
) -> AsyncGenerator[protocol.Event, None]:
    """Yield events after a position (default: new ones). Raises `ServerError` at the deadline."""
    if after is None:
        after = (await http.get("/v1/status", protocol.Counts)).position
    while True:
        query = {"after": after, "task": task, "limit": 1000, "wait_s": _WAIT_S}
        page = await http.get("/v1/events", list[protocol.Event], query=query, wait_s=_WAIT_S)
        for event in page:
            yield event
            after = event.position


async def stream_log(
    http: Transport, session: str, *, tail: int | None, follow: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the log of a session, or its last `tail` bytes; with `follow` until the session ends.

    A stream also ends when the server stops. So the log is complete once a request that began after
    the end of the session returns no data. Raises `ServerError` at the deadline.
    """
    path = f"/v1/sessions/{quote_id(session)}/log"
    budget = RetryBudget(http.deadline_s)
    offset: int | None = None if tail else 0
    complete = not follow
    while True:
        progress = False
        query = {"offset": offset, "tail": tail if offset is None else None, "follow": not complete}
        error = ServerError(f"{http.url} ended the log, because it is shutting down")
        try:
            async with http.stream(path, query) as answer:
                offset = int(answer.headers.get("tugline-offset", offset or 0))
                async for chunk in answer.content.iter_any():
                    yield chunk
                    offset += len(chunk)
                    progress = True
                    budget.renew()
            if complete and not progress:
                return
            complete = complete or await _is_final(http, session)
            budget.renew()
        except BROKEN as broken:
            error = http.make_unreachable_error(broken)
        except ServerError as problem:
            if not is_transient(problem):
                raise
            error = problem
        await budget.wait(error)


async def _is_final(http: Transport, session: str) -> bool:
    view = await http.get(f"/v1/sessions/{quote_id(session)}", protocol.SessionView)
    return view.status in TERMINAL


# --------------------------------------------------------------------------- results and groups
class Result:
    """The result of one session; its trajectory is decoded on first access."""

    def __init__(self, view: protocol.ResultView, packed: bytes) -> None:
        self.view = view
        self.packed = packed
        """`types.encode`, zstd-compressed; empty for a session that never ran.

        Also empty, with ``view.bytes`` > 0, if the server has lost the trajectory.
        """
        self.cursor = view.position
        """Position to acknowledge once this and all previous results are stored."""

    @cached_property
    def trajectory(self) -> Trajectory | None:
        """Trajectory of the session; None if it never ran or the server has lost it."""
        return unpack(self.packed) if self.packed else None

    def __repr__(self) -> str:
        view = self.view
        return f"<Result {view.session} {view.status} reward={view.reward} at {view.position}>"

    def _repr_html_(self) -> str:
        """Render an HTML table for notebooks."""
        view = self.view
        tokens = f"{view.trained} of {view.sampled} sampled tokens are trained"
        failure = view.failure.message if view.failure else ""
        cells = (view.session, view.status, f"reward {view.reward}", tokens, failure)
        return f"<table><tr><td>{'<td>'.join(map(escape, cells))}</table>"


class GroupResults(NamedTuple):
    """All results of a released task."""

    view: protocol.TaskView
    """Released task; `missing` lists the samples without a usable result."""
    results: tuple[Result, ...]
    """Results in order of samples."""

    @property
    def cursor(self) -> int:
        """Position to acknowledge once this and all previous groups are stored."""
        return self.view.released or 0


R = TypeVar("R", Result, GroupResults)


def group_results(page: protocol.Results, results: Sequence[Result]) -> list[GroupResults]:
    """Return the groups of a page with their results."""
    members: dict[str, list[Result]] = {group.id: [] for group in page.groups}
    for result in results:
        members[result.view.task].append(result)
    sizes = Counter(view.task for view in page.items)
    return [
        GroupResults(group, tuple(members[group.id]))
        for group in page.groups
        if len(members[group.id]) == sizes[group.id]  # else it comes again, with its changes
    ]


async def stream_pages(
    http: Transport, query: protocol.ResultQuery, *, follow: bool
) -> AsyncGenerator[tuple[protocol.Results, list[Result]], None]:
    """Yield each page after `query.after`, and its results with their trajectories.

    A page is empty if there was no new item within the wait. Without `follow` the stream ends at
    the newest result. Raises `ServerError` at the deadline.
    """
    query = replace(query, limit=_AT_ONCE, wait_s=_WAIT_S if follow else 0.0)
    while True:
        fields = asdict(query)
        wait_s = query.wait_s
        page = await http.get("/v1/results", protocol.Results, query=fields, wait_s=wait_s)
        results: list[Result] = []
        for start in range(0, len(page.items), _AT_ONCE):
            views = page.items[start : start + _AT_ONCE]
            read = await asyncio.gather(*(_read_result(http, view) for view in views))
            results += [result for result in read if result is not None]
        yield page, results
        if not (page.items or page.groups or follow):
            return
        query = replace(query, after=page.cursor)


async def read_items(
    pages: AsyncGenerator[Sequence[R], None], consumer: str | None, ack: Acknowledge | None
) -> AsyncGenerator[R, None]:
    """Yield the items of pages. With `ack`, requesting an item acknowledges the one before it."""
    if ack is not None and consumer is None:
        raise UsageError("auto_ack requires a consumer")
    clock = asyncio.get_running_loop().time
    done = 0
    acked_at = clock()

    async def acknowledge() -> None:
        nonlocal done, acked_at
        if ack is not None and consumer and done:
            await ack(consumer, done)
            done = 0
            acked_at = clock()

    try:
        async with contextlib.aclosing(pages):
            async for page in pages:
                for item in page:
                    yield item
                    done = item.cursor
                    if clock() - acked_at >= ACK_EVERY_S:
                        await acknowledge()
                await acknowledge()
    finally:
        with contextlib.suppress(ServerError, UsageError):  # the results are delivered again
            await acknowledge()


async def _read_result(http: Transport, view: protocol.ResultView) -> Result | None:
    """Return a result with its trajectory; None if a later one, not read yet, replaces it."""
    packed = b""
    if view.bytes:
        path = f"/v1/sessions/{quote_id(view.session)}/trajectory"
        try:
            packed = await http.get(path, bytes, query={"revision": view.revision})
        except Conflict:
            return None
        except Missing as error:  # later results can still be read
            _log.error("a trajectory is lost", session=view.session, error=str(error))
    return Result(view, packed)
