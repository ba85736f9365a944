"""Long polls and event streams: notification, disconnected clients, shutdown."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from support.deployment import read_samples
from support.polling import until
from support.server import RestartableServer, RunningServer
from tugline.protocol import Event

SSE = {"accept": "text/event-stream"}


async def test_a_long_poll_ends_at_its_timeout(server: RunningServer) -> None:
    """The response is an empty page with the cursor to continue from."""
    async with asyncio.timeout(20):
        response = await server.ask("GET", "/v1/results?wait_s=0.05&after=0")
    assert response.json == {"items": [], "groups": [], "cursor": 0}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/results?wait_s=60&after={}", {}),
        ("/v1/events?wait_s=60&after={}", {}),
        ("/v1/events?after={}", SSE),
        ("/v1/sessions/t-0/log?follow=true", {}),
    ],
)
async def test_disconnected_clients_are_dropped(
    server: RunningServer, path: str, headers: dict[str, str]
) -> None:
    """A client that disconnects is forgotten at once, long before the end of its wait."""
    await server.submit()
    position = (await server.ask("GET", "/v1/status")).json["position"]
    reading = asyncio.create_task(server.ask("GET", path.format(position), headers=headers))
    await until(lambda: server.app.waits.open == 1)
    reading.cancel()
    await until(lambda: server.app.waits.open == 0)


async def test_shutdown_does_not_wait_for_clients(live: RestartableServer) -> None:
    """Long polls get 503, streams end, and the server is down within two seconds."""
    async with aiohttp.ClientSession() as http:
        server = RunningServer(live.url, live.app, live.control, http)
        node = await server.join()
        lease = f"/v1/nodes/{node.node}/lease"
        asking = [
            asyncio.create_task(one)
            for one in (
                server.ask("GET", "/v1/results?wait_s=60"),
                server.ask("POST", lease, node.token, json={"capacity": 1}),
                *(server.ask("GET", "/v1/events", headers=SSE) for _ in range(5)),
            )
        ]
        await until(lambda: live.app.waits.open == len(asking))
        async with asyncio.timeout(2):
            await live.stop()
        *polls, stream = await asyncio.gather(*asking[:3])
    assert [answer.refusal for answer in polls] == [(503, "stopping")] * 2
    assert (stream.status, stream.body) == (200, b": events\n\n")


async def test_many_clients_wait_at_once(server: RunningServer) -> None:
    """300 long polls on their own connections are counted, and all woken by one result."""
    path = "/v1/results?wait_s=60"
    asking = [asyncio.create_task(server.ask("GET", path, "read")) for _ in range(300)]
    await until(lambda: server.app.waits.open == 300)
    page = await server.ask("GET", "/metrics")
    assert read_samples(page.body)["tugline_waiting"] == {(): 300}
    await server.finish()
    for answer in await asyncio.wait_for(asyncio.gather(*asking), 20):
        assert [one["session"] for one in answer.json["items"]] == ["t-0"]
    assert server.app.waits.open == 0


# --------------------------------------------------------------------------- streams
async def _read_event(got: aiohttp.ClientResponse) -> tuple[str, Event]:
    """The next event's name and content; comments are skipped."""
    while True:
        fields: dict[str, str] = {}
        while line := (await got.content.readline()).decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            fields[name] = value
        if "data" in fields:
            event = msgspec.json.decode(fields["data"], type=Event)
            assert event.position == int(fields["id"])
            return fields["event"], event


async def test_a_stream_begins_now_or_after_a_position(server: RunningServer) -> None:
    """A stream of one task, or of all, has neither a gap nor a repetition."""
    for name in ("a", "b"):
        await server.submit(id=name)
    async with server.request("GET", "/v1/events", "read", headers=SSE) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        await server.submit(id="c")
        name, event = await _read_event(got)
        assert (name, event.task) == ("task.accepted", "c")
    page = (await server.ask("GET", "/v1/events")).json
    assert [one["task"] for one in page] == ["a", "b", "c"]
    path = f"/v1/events?after={page[0]['position']}"
    async with server.request("GET", path, headers=SSE) as got:
        assert [(await _read_event(got))[1].task for _ in range(2)] == ["b", "c"]
    async with server.request("GET", f"{path}&task=c", headers=SSE) as got:
        assert (await _read_event(got))[1].task == "c"


async def test_an_idle_stream_sends_keep_alives(server: RunningServer) -> None:
    """Keep-alives are comments, for proxies and readers."""
    server.app.waits.keep_alive_s = 0.05
    async with server.request("GET", "/v1/events", headers=SSE) as got:
        text = await asyncio.wait_for(got.content.readuntil(b"keep-alive\n\n"), 20)
    assert all(line.startswith(b":") for line in text.split(b"\n") if line)
