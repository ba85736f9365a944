"""The node of this process: a gateway before the engine, what runs sessions, and who watches them.

Metrics are always kept, traces are sent where ``OTEL_EXPORTER_OTLP_ENDPOINT`` says.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from msgspec.structs import replace

from tugline.gateway.app import Gateway
from tugline.launch.engine import EngineConnection
from tugline.launch.settings import Settings
from tugline.node.app import Node
from tugline.node.metrics import Engines, NodeMetrics
from tugline.node.telemetry import Telemetry
from tugline.protocol import Dispatcher
from tugline.rollout.parts import Parts
from tugline.tracing.tracer import open_tracer

RECORDINGS = "recordings"


@dataclass(frozen=True, slots=True)
class Worker:
    """A node with what belongs to it."""

    node: Node
    gateway: Gateway
    metrics: NodeMetrics
    parts: Parts


@contextlib.asynccontextmanager
async def worker(
    told: Settings,
    folder: Path,
    dispatcher: Dispatcher,
    reached: EngineConnection,
    *,
    keep: bool = False,
) -> AsyncIterator[Worker]:
    """A node that works in `folder` and gets its work from `dispatcher` once it is run.

    With `keep` it never removes a recording, however old: they are what the run is for.
    """
    settings = replace(
        told.node,
        name=name_of(told),
        engines=told.node.engines or reached.urls,
        versions={"tugline": version("tugline"), **told.node.versions},
    )
    tracer = open_tracer(os.environ, node=settings.name)
    recordings = folder / RECORDINGS
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            Gateway(
                reached.upstream,
                reached.rendering,
                recordings,
                host=told.gateway.host,
                port=told.gateway.port,
            )
        )
        watch = Telemetry(
            node=settings.name, model=gateway.card.id, calls=gateway.read_calls, tracer=tracer
        )
        stack.push_async_callback(watch.close)
        engines, parts = Engines(settings.engines), Parts()
        await stack.enter_async_context(engines.looking())
        node = Node(
            dispatcher,
            gateway,
            parts,
            folder,
            settings,
            recordings=None if keep else recordings,
            observer=watch,
        )
        yield Worker(node, gateway, NodeMetrics(node, watch, gateway.traffic, engines), parts)


def name_of(told: Settings) -> str:
    """What the node is called: as it was told, or like the machine."""
    return told.node.name or socket.gethostname()
