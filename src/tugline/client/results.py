"""Results and groups as they come: a binary stream that goes on over every break.

The server sends frames: a page (`Results`), then the trajectory of each of its items. Here they
become items again. After a break the stream is asked for from the last whole page, and what was
handed out of a page already is left out, so in one iteration nothing comes twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import NamedTuple

import aiohttp
import msgspec
import zstandard

from tugline.client.transport import Attempts, Transport
from tugline.protocol import Consumer, Results, ResultView, TaskView
from tugline.types import Trajectory, decode

FRAMES = "application/x-msgpack"
_GROUP_ITEMS = 100
"""Results that a page of groups may have: all of a group are in memory at once."""


class Result:
    """The result of one session; its trajectory is unpacked when it is first looked at."""

    def __init__(self, view: ResultView, packed: bytes) -> None:
        self.view = view
        self.packed = packed
        """`types.encode`, zstd-compressed; empty for a session that never ran."""

    @property
    def cursor(self) -> int:
        """Acknowledge this once the result, and all before it, are safe."""
        return self.view.position

    @cached_property
    def trajectory(self) -> Trajectory | None:
        """What a trainer learns from; None for a session that never ran."""
        return unpack(self.packed) if self.packed else None

    def __repr__(self) -> str:
        of = self.view
        return f"<Result {of.session} {of.status} reward={of.reward} at {of.position}>"


class GroupResults(NamedTuple):
    """All results of a task that has been released."""

    view: TaskView
    """Its `missing` names the samples without a usable result."""
    results: tuple[Result, ...]
    """By sample."""

    @property
    def cursor(self) -> int:
        """Acknowledge this once the group, and all before it, are safe."""
        return self.view.released or 0


class Wanted(NamedTuple):
    """What to read."""

    consumer: str | None
    after: int | None
    tasks: tuple[str, ...]
    groups: bool
    follow: bool
    """Go on when there is nothing more for now."""


def unpack(packed: bytes) -> Trajectory:
    """A trajectory from its bytes."""
    return decode(zstandard.ZstdDecompressor().decompress(packed), Trajectory)


async def stream(
    http: Transport, wanted: Wanted
) -> AsyncGenerator[Result | GroupResults | None, None]:
    """Results, or groups, from `wanted.after` on; None where a page ends.

    Raises `ServerError` when there is no way on.
    """
    after, given = await _start(http, wanted), 0
    attempts = Attempts(http, "the stream of results")
    while not attempts.over:
        async with attempts:
            async with aclosing(_pages(http, wanted, after)) as pages:
                async for page, item in pages:
                    attempts.renew()
                    if item is None:
                        after = page.cursor
                        yield None
                    elif item.cursor > given:
                        yield item
                        given = item.cursor
                        attempts.renew()
            attempts.over = not wanted.follow and not await _more(http, wanted, after)


async def _start(http: Transport, wanted: Wanted) -> int:
    """Where a consumer left off; asked once, so that a break cannot lead back to it."""
    if wanted.after is not None:
        return wanted.after
    if wanted.consumer is None:
        return 0
    consumers = await http.ask("GET", "/v1/consumers", list[Consumer])
    return next((one.acked for one in consumers if one.name == wanted.consumer), 0)


async def _more(http: Transport, wanted: Wanted, after: int) -> bool:
    """Whether a stream that ended did so too early, since its server was stopped."""
    query = _query(wanted, after) | {"limit": 1}
    page = await http.ask("GET", "/v1/results", Results, query=query)
    return bool(page.items or page.groups)


async def _pages(
    http: Transport, wanted: Wanted, after: int
) -> AsyncGenerator[tuple[Results, Result | GroupResults | None], None]:
    """Each item with its page, and None after the last one of a page."""
    query = _query(wanted, after) | {"follow": wanted.follow}
    async with http.stream("/v1/results", FRAMES, query=query) as answer:
        while (head := await _frame(answer, last=True)) is not None:
            page = msgspec.msgpack.decode(head, type=Results)
            groups = {group.id: group for group in page.groups}
            gathered: dict[str, list[Result]] = {name: [] for name in groups}
            for view in page.items:
                result = Result(view, await _frame(answer) or b"")
                if not wanted.groups:
                    yield page, result
                else:
                    gathered[view.task].append(result)
            for name, group in groups.items():
                yield page, GroupResults(group, tuple(gathered.pop(name)))
            yield page, None


def _query(wanted: Wanted, after: int) -> dict[str, int | bool | Sequence[str]]:
    return {
        "after": after,
        "task": wanted.tasks,
        "groups": wanted.groups,
        "limit": _GROUP_ITEMS,
    }


async def _frame(answer: aiohttp.ClientResponse, *, last: bool = False) -> bytes | None:
    """The bytes of the next frame; None at the end of the stream, where one may come."""
    if last and (answer.content.at_eof() or not (first := await answer.content.read(1))):
        return None
    start = first if last else b""
    length = int.from_bytes(start + await answer.content.readexactly(4 - len(start)), "big")
    return await answer.content.readexactly(length)
