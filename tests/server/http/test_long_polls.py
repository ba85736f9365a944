"""Who waits is woken, let go when it leaves, and sent home when the server goes down."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from served import TOKENS, Served
from tugline.protocol import NodeRegistration
from tugline.server.blobs import open_blobs
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.store.database import open_database

SSE = {"accept": "text/event-stream"}


async def _until(app: Api, waiting: int) -> None:
    async with asyncio.timeout(10):
        while app.waits.open != waiting:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def test_a_long_poll_is_answered_when_there_is_something(server: Served) -> None:
    """Not before, and not a moment later."""
    asking = asyncio.create_task(server.ask("GET", "/v1/results?wait_s=30"))
    await _until(server.app, 1)
    await server.finish()
    response = await asyncio.wait_for(asking, 20)
    assert [one["session"] for one in response.json["items"]] == ["t-0"]
    assert server.app.waits.open == 0


async def test_a_wait_that_brings_nothing_ends_in_time(server: Served) -> None:
    """An empty answer, with the cursor to go on from."""
    async with asyncio.timeout(20):
        response = await server.ask("GET", "/v1/results?wait_s=0.05&after=0")
    assert response.json == {"items": [], "groups": [], "cursor": 0}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/results?wait_s=60", {}),
        ("/v1/events?wait_s=60", {}),
        ("/v1/events", SSE),
        ("/v1/sessions/t-0/log?follow=true", {}),
    ],
)
async def test_whoever_hangs_up_is_forgotten(
    server: Served, path: str, headers: dict[str, str]
) -> None:
    """A client that leaves frees its place at once, long before its time is up."""
    await server.submit()
    position = (await server.ask("GET", "/v1/status")).json["position"]
    ask = path if "log" in path else f"{path}{'&' if '?' in path else '?'}after={position}"

    async def reads() -> None:
        async with server.request("GET", ask, headers=headers) as got:
            await got.read()

    reading = asyncio.create_task(reads())
    await _until(server.app, 1)
    reading.cancel()
    await _until(server.app, 0)


async def test_a_lease_that_nobody_waits_for_takes_no_work(server: Served) -> None:
    """Work goes to who is there: a node that hung up is given nothing."""
    gone, here = await server.join("gone"), await server.join("here")
    asking = asyncio.create_task(server.lease(gone, wait_s=30))
    await _until(server.app, 1)
    asking.cancel()
    await _until(server.app, 0)
    await server.submit()
    (work,) = (await server.lease(here)).work
    assert (await server.ask("GET", "/v1/sessions/t-0")).json["node"] == here.node
    assert work.session.id == "t-0"


async def test_a_server_that_goes_down_waits_for_nobody(tmp_path: Path) -> None:
    """Open long-polls get 503, streams end as streams do, and it is down within two seconds."""
    database = open_database(f"sqlite:{tmp_path / 'db'}")
    async with (
        ControlPlane(database, open_blobs(str(tmp_path / "blobs")), folder=tmp_path) as control,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKENS.client}"}) as http,
    ):
        app = Api(control, TOKENS)
        node = await control.dispatcher.register(NodeRegistration(name="n", slots=1, capacity=1))

        async def ask(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
            async with http.get(url, headers=headers) as got:
                return got.status, await got.read()

        async def lease(url: str) -> tuple[int, bytes]:
            mine = {"authorization": f"Bearer {node.token}"}
            path = f"{url}/v1/nodes/{node.node}/lease"
            async with http.post(path, json={"capacity": 1}, headers=mine) as got:
                return got.status, await got.read()

        async with serve_api(app) as url:
            ways = (("/v1/results?wait_s=60", {}), ("/v1/events", SSE))
            asking = [asyncio.create_task(ask(url + path, how)) for path, how in ways * 5]
            asking.append(asyncio.create_task(lease(url)))
            await _until(app, len(asking))
            began = time.monotonic()
        assert time.monotonic() - began < 2
        poll, told, *_, leased = await asyncio.gather(*asking)
        for status, problem in (poll, leased):
            assert status == 503
            assert b"urn:tugline:problem:stopping" in problem
        assert told == (200, b": events\n\n")


async def test_many_wait_at_once(server: Served) -> None:
    """300 long-polls, each on its own connection, are all woken by one result."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"authorization": f"Bearer {TOKENS.read}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:

        async def ask() -> int:
            async with http.get(server.url + "/v1/results?wait_s=60") as got:
                return len((await got.json())["items"])

        asking = [asyncio.create_task(ask()) for _ in range(300)]
        await _until(server.app, 300)
        await server.finish()
        assert await asyncio.wait_for(asyncio.gather(*asking), 20) == [1] * 300
