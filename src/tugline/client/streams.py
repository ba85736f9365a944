"""Events and logs as they come, from where they broke off: no break loses or repeats anything."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from tugline.client.transport import Attempts, Transport, quoted
from tugline.protocol import Counts, Event, SessionView
from tugline.types import TERMINAL


async def events(
    http: Transport, after: int | None, task: str | None
) -> AsyncGenerator[Event, None]:
    """What happens after a position, or from now on. Raises `ServerError` when there is no way."""
    if after is None:
        after = (await http.ask("GET", "/v1/status", Counts)).position
    attempts = Attempts(http, "the stream of events")
    while not attempts.over:
        async with (
            attempts,
            http.stream(
                "/v1/events",
                "text/event-stream",
                query={"task": task},
                headers={"Last-Event-ID": str(after)},
            ) as answer,
        ):
            async for line in answer.content:
                attempts.renew()
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:], type=Event)
                    yield event
                    after = event.position
                    attempts.renew()


async def log(
    http: Transport, session: str, *, tail: int | None, follow: bool
) -> AsyncGenerator[bytes, None]:
    """The log of a session, from its beginning or the last `tail` bytes; to its end if followed.

    A stream also ends when its server goes down. So the end is where nothing more comes of a log
    that was known to be complete before it was asked for.
    """
    path, attempts = f"/v1/sessions/{quoted(session)}/log", Attempts(http, "the log")
    offset: int | None = None if tail else 0
    complete = not follow
    while not attempts.over:
        more = False
        query = {"offset": offset, "tail": tail if offset is None else None, "follow": not complete}
        async with attempts:
            async with http.stream(path, "text/plain", query=query) as answer:
                offset = int(answer.headers.get("tugline-offset", offset or 0))
                async for piece in answer.content.iter_any():
                    yield piece
                    offset, more = offset + len(piece), True
                    attempts.renew()
            attempts.over = complete and not more
            complete = complete or await _is_over(http, session)
            attempts.renew()


async def _is_over(http: Transport, session: str) -> bool:
    return (
        await http.ask("GET", f"/v1/sessions/{quoted(session)}", SessionView)
    ).status in TERMINAL
