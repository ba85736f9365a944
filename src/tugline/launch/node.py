"""Node with its gateway and engine, in its own process or in the server's.

Metrics are always collected; traces are sent to ``OTEL_EXPORTER_OTLP_ENDPOINT``, if it is set.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path

from msgspec.structs import replace

from tugline.aio import handle_signals
from tugline.client.nodes import NodeClient
from tugline.gateway.app import Gateway
from tugline.launch.engine import EngineConnection, open_engine, share_engine
from tugline.launch.folder_lock import folder_lock
from tugline.launch.garbage import managed_gc
from tugline.launch.processes import NODES, divide, keep_nodes
from tugline.launch.server import open_server, read_url
from tugline.launch.settings import Echo, Settings
from tugline.launch.tokens import load_tokens
from tugline.node.admission import Engines
from tugline.node.app import Node
from tugline.node.metrics import NodeMetrics
from tugline.node.telemetry import open_tracer
from tugline.protocol import Dispatcher
from tugline.rollout.parts import Parts
from tugline.types import PluginSpec
from tugline.web.serve import raise_file_limit, serve

_M_ARENA_MAX = -8
"""From ``malloc.h`` of glibc."""
RECORDINGS = "recordings"
"""Folder of the recordings in that of a node."""


@contextlib.asynccontextmanager
async def open_node(
    settings: Settings,
    folder: Path,
    server: Dispatcher,
    engine: EngineConnection,
    *,
    keep_recordings: bool = False,
) -> AsyncIterator[tuple[Node, NodeMetrics]]:
    """Open a node of `server` in `folder`; the caller runs it.

    With `keep_recordings`, old recordings are not deleted.
    """
    own = replace(
        settings.node,
        name=name_node(settings),
        engines=settings.node.engines or engine.urls,
        versions={"tugline": version("tugline"), **settings.node.versions},
    )
    tracer = open_tracer(os.environ, node=own.name)
    recordings = folder / RECORDINGS
    gateway = Gateway(
        engine.upstream,
        engine.rendering,
        recordings,
        host=settings.gateway.host,
        port=settings.gateway.port,
    )
    async with gateway, Engines(own.engines) as engines, contextlib.AsyncExitStack() as stack:
        if tracer is not None:
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        swept = None if keep_recordings else recordings
        node = Node(server, gateway, Parts(), folder, own, swept, tracer=tracer, engines=engines)
        yield node, NodeMetrics(node, engines)


def name_node(settings: Settings) -> str:
    """Return the configured name of the node, or the machine's name."""
    return settings.node.name or socket.gethostname()


async def run_server_and_nodes(settings: Settings, folder: Path, echo: Echo) -> None:
    """Run a server with a node in this process, or with ``node.processes``, until a signal.

    Between server and node in one process, there is no socket.
    """
    if settings.node.processes is not None:
        nodes = divide(settings, name_node(settings))
        async with open_server(settings.server, folder, echo):
            token = load_tokens(folder).join
            await _keep_until_signal(nodes, settings, folder, read_url(folder), token, echo)
        return
    async with (
        open_server(settings.server, folder, echo) as (control, metrics),
        _open_announced(settings, folder, control.dispatcher, echo) as (node, node_metrics),
    ):
        metrics.nodes.append(node_metrics)
        await node.run()


async def run_node(settings: Settings, folder: Path, url: str, token: str, echo: Echo) -> None:
    """Run a node of the server at `url`, or as many as ``node.processes``, until a signal."""
    if settings.node.processes is not None:
        nodes = divide(settings, name_node(settings))
        await _keep_until_signal(nodes, settings, folder, url, token, echo)
        return
    token_file = folder / NODES / name_node(settings) / "token"
    async with (
        NodeClient(url, token, token_file=token_file) as server,
        _open_announced(settings, folder, server, echo) as (node, metrics),
        contextlib.AsyncExitStack() as stack,
    ):
        if settings.node.metrics_port is not None:
            app = metrics.make_app()
            host = settings.gateway.host
            page = await stack.enter_async_context(serve(app, host, settings.node.metrics_port))
            echo(f"metrics are at {page}/metrics")
        await node.run()


async def _keep_until_signal(
    nodes: Sequence[Settings], settings: Settings, folder: Path, url: str, token: str, echo: Echo
) -> None:
    """Keep processes of nodes running until a signal; an engine of `settings` is served here."""
    stopped = asyncio.Event()
    main = asyncio.current_task()
    ready = False

    def stop() -> None:
        stopped.set()
        if not ready and main is not None:
            main.cancel()

    slots = settings.node.slots
    with handle_signals(stop):
        async with contextlib.AsyncExitStack() as stack:
            engine = settings.engine
            if not engine.urls:
                opened = await stack.enter_async_context(open_engine(engine, slots=slots))
                engine = share_engine(opened, engine, folder)
            nodes = [replace(node, engine=engine) for node in nodes]
            ready = True
            await keep_nodes(nodes, folder, url, token, stopped, echo)


def _limit_heaps() -> None:
    """Let all threads share glibc's one heap, before they start.

    Threads of sandboxes and recordings free what others allocated: with a heap for each, their
    fragments add up over thousands of sessions. Threads seldom allocate at the same time here.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


@contextlib.asynccontextmanager
async def _open_announced(
    settings: Settings, folder: Path, server: Dispatcher, echo: Echo
) -> AsyncIterator[tuple[Node, NodeMetrics]]:
    """Open a node that drains at a signal; print its state and the weaknesses of its runtime."""
    raise_file_limit()
    _limit_heaps()
    name = name_node(settings)
    slots = settings.node.slots
    own_folder = folder / NODES / name
    node: Node | None = None
    main = asyncio.current_task()

    def stop() -> None:
        if node is not None:
            echo("draining: waiting for the running sessions; interrupt again to stop at once")
            node.drain()
        elif main is not None:
            main.cancel()

    with folder_lock(own_folder, instead="give this node another --name"), handle_signals(stop):
        echo(f"node {name} probes its engine")
        async with (
            open_engine(settings.engine, slots=slots) as engine,
            open_node(settings, own_folder, server, engine) as (opened, metrics),
        ):
            node = opened
            model = opened.gateway.card.id
            mode = engine.upstream.wire.mode
            default = PluginSpec("auto")  # the default runtime of tasks
            opened.check = opened.parts.runtime(default).check_available
            problem = await asyncio.to_thread(opened.check)
            if problem:
                echo(f"node {name} waits in quarantine until it can run sessions: {problem}")
            else:
                echo(f"node {name} is up: {slots} slots, {model} in {mode} mode")
            await opened.parts.report_weaknesses(default)
            async with managed_gc(lambda: opened.gateway.idle):
                yield opened, metrics
