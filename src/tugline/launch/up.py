"""What works until it is told to stop: a server with its node, or a node alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tugline.client.nodes import NodeClient
from tugline.launch.engine import engine
from tugline.launch.folder import only_one
from tugline.launch.node import Worker, name_of, worker
from tugline.launch.server import ELSEWHERE, Say, api, control_plane
from tugline.launch.settings import Settings
from tugline.launch.stopping import stopping
from tugline.node.app import Node
from tugline.protocol import Dispatcher
from tugline.types import PluginSpec
from tugline.web.serve import freeze_gc, serve

NODES = "nodes"
Run = Callable[[Worker], Awaitable[None]]


async def serve_and_work(told: Settings, folder: Path, say: Say) -> None:
    """A server and a node that talk to each other without a socket, until a signal."""
    with only_one(folder, instead=ELSEWHERE):
        async with (
            control_plane(told.server, folder) as control,
            api(control, told.server, folder) as (url, metrics),
        ):
            say(f"the server is up at {url}")

            async def run(one: Worker) -> None:
                metrics.others.append(one.metrics.page)
                await one.node.run()

            await _work(told, folder, control.dispatcher, say, run)


async def work(told: Settings, folder: Path, url: str, token: str, say: Say) -> None:
    """A node of the server at `url`, until a signal."""

    async def run(one: Worker) -> None:
        if told.node.metrics_port is None:
            await one.node.run()
            return
        async with serve(one.metrics.app(), told.gateway.host, told.node.metrics_port) as page:
            say(f"metrics are at {page}/metrics")
            await one.node.run()

    kept = folder / NODES / name_of(told) / "token"
    async with NodeClient(url, token, token_file=kept) as server:
        await _work(told, folder, server, say, run)


async def _work(told: Settings, folder: Path, server: Dispatcher, say: Say, run: Run) -> None:
    """One node from its start until it has drained."""
    name = name_of(told)
    mine = folder / NODES / name
    node: Node | None = None
    me = asyncio.current_task()

    def gently() -> None:
        if node is not None:
            say("draining: what runs may finish; stop again to end at once")
            node.drain()
        elif me is not None:
            me.cancel()

    with only_one(mine, instead="give this node another --name"), stopping(gently):
        say(f"node {name} asks its engine what it can do")
        async with (
            engine(told.engine, slots=told.node.slots) as reached,
            worker(told, mine, server, reached) as working,
        ):
            node = working.node
            model, mode = working.gateway.card.id, reached.upstream.wire.mode
            say(f"node {name} is up: {told.node.slots} slots, {model} in {mode} mode")
            await working.parts.report_weaknesses(
                PluginSpec("auto")
            )  # what tasks get that name no runtime
            freeze_gc()
            await run(working)
