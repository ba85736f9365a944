"""Events and logs as they come, from where they broke off: no break loses or repeats anything."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from tugline.client.transport import BROKEN, Patience, Transport, is_passing, quoted
from tugline.errors import ServerError
from tugline.protocol import Counts, Event, SessionView
from tugline.types import TERMINAL


async def events(
    http: Transport, after: int | None, task: str | None
) -> AsyncGenerator[Event, None]:
    """What happens after a position, or from now on. Raises `ServerError` when there is no way."""
    if after is None:
        after = (await http.ask("GET", "/v1/status", Counts)).position
    patience = Patience(http.deadline_s)
    while True:
        error = ServerError(f"{http.url} ended the stream of events; it is going down")
        try:
            headers = {"Last-Event-ID": str(after)}
            async with http.stream(
                "/v1/events", "text/event-stream", query={"task": task}, headers=headers
            ) as answer:
                async for line in answer.content:
                    patience.renew()
                    if line.startswith(b"data: "):
                        event = msgspec.json.decode(line[6:], type=Event)
                        yield event
                        after = event.position
                        patience.renew()
        except BROKEN as broken:
            error = http.unreachable(broken)
        except ServerError as refused:
            if not is_passing(refused):
                raise
            error = refused
        await patience.wait(error)


async def log(
    http: Transport, session: str, *, tail: int | None, follow: bool
) -> AsyncGenerator[bytes, None]:
    """The log of a session, from its beginning or the last `tail` bytes; to its end if followed.

    A stream also ends when its server goes down. So the end is where nothing more comes of a log
    that was known to be complete before it was asked for.
    """
    path, patience = f"/v1/sessions/{quoted(session)}/log", Patience(http.deadline_s)
    offset: int | None = None if tail else 0
    complete = not follow
    while True:
        error, more = ServerError(f"{http.url} ended the log; it is going down"), False
        query = {"offset": offset, "tail": tail if offset is None else None, "follow": not complete}
        try:
            async with http.stream(path, "text/plain", query=query) as answer:
                offset = int(answer.headers.get("tugline-offset", offset or 0))
                async for piece in answer.content.iter_any():
                    yield piece
                    offset, more = offset + len(piece), True
                    patience.renew()
            if complete and not more:
                return
            complete = complete or await _is_over(http, session)
            patience.renew()
        except BROKEN as broken:
            error = http.unreachable(broken)
        except ServerError as refused:
            if not is_passing(refused):
                raise
            error = refused
        await patience.wait(error)


async def _is_over(http: Transport, session: str) -> bool:
    return (
        await http.ask("GET", f"/v1/sessions/{quoted(session)}", SessionView)
    ).status in TERMINAL
