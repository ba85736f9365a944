"""Server-sent events: resumed by position, kept alive, ended with the server."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from served import Served
from tugline.protocol import Event

SSE = {"accept": "text/event-stream"}


async def _event(got: aiohttp.ClientResponse) -> tuple[str, Event]:
    """The next event: its name, and what it holds; comments are passed over."""
    while True:
        fields: dict[str, str] = {}
        while line := (await got.content.readline()).decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        if "data" in fields:
            event = msgspec.json.decode(fields["data"], type=Event)
            assert event.position == int(fields["id"])
            return fields["event"], event


async def test_events_come_as_they_happen(server: Served) -> None:
    """A stream that names no position begins with what is new."""
    await server.submit(id="before")
    async with server.request("GET", "/v1/events", "read", headers=SSE) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        await server.submit(id="after")
        name, event = await _event(got)
        assert (name, event.task) == ("task.accepted", "after")


async def test_a_stream_resumes_after_a_position(server: Served) -> None:
    """It goes on behind that event, without a gap and without a repeat; of one task, or of all."""
    for name in ("a", "b", "c"):
        await server.submit(id=name)
    page = (await server.ask("GET", "/v1/events")).json
    assert [one["task"] for one in page] == ["a", "b", "c"]
    path = f"/v1/events?after={page[0]['position']}"
    async with server.request("GET", path, headers=SSE) as got:
        assert [(await _event(got))[1].task for _ in range(2)] == ["b", "c"]
    async with server.request("GET", f"{path}&task=c", headers=SSE) as got:
        assert (await _event(got))[1].task == "c"


async def test_a_silent_stream_says_that_it_lives(server: Served) -> None:
    """A comment, now and then, for proxies and for readers that want to know."""
    server.app.waits.keep_alive_s = 0.05
    async with server.request("GET", "/v1/events", headers=SSE) as got:
        text = await asyncio.wait_for(got.content.readuntil(b"keep-alive\n\n"), 20)
    assert all(line.startswith(b":") for line in text.split(b"\n") if line)
