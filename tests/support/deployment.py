"""A server and a node in one process, with their metrics, over a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from support.engine import RENDERING, Play, reply_with
from support.polling import until
from support.server import make_control
from support.tasks import make_task
from tugline.chat.engines.generate import Embedded
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.inference.server import create_app
from tugline.node.admission import Engines
from tugline.node.app import Node
from tugline.node.metrics import NodeMetrics
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import Tracer
from tugline.protocol import ResultQuery
from tugline.rollout.parts import Parts
from tugline.server.control import ControlPlane
from tugline.server.metrics import ServerMetrics
from tugline.testing import ScriptedEngine
from tugline.types import PluginSpec, Task
from tugline.web.serve import serve

CALL = (
    "import json, os, urllib.request as r\n"
    "body = json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}).encode()\n"
    "head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
    "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
    "r.urlopen(r.Request(url, body, head)).read()\n"
)
"""An agent that calls the model once."""


def script_task(
    name: str, script: str = CALL, *, samples: int = 1, tenant: str = "default"
) -> Task:
    """A task whose agent runs `script`; its files pass their test."""
    parts = {
        "harness": PluginSpec("shell", {"command": ["python3", "-I", "-c", script]}),
        "runtime": PluginSpec("local"),  # a script may look at the folder that it is in
        "files": {"test_it.py": "def test_it():\n    pass\n"},
    }
    return make_task(name, samples, tenant=tenant, **parts)


Values = dict[tuple[str, ...], float]


def read_samples(page: bytes) -> dict[str, Values]:
    """Samples by name and by the values of their labels, which are in order of their names."""
    samples: dict[str, Values] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[
                tuple(value for _, value in sorted(sample.labels.items()))
            ] = sample.value
    return samples


@dataclass
class Deployment:
    """Parts of the running process."""

    control: ControlPlane
    node: Node
    gateway: Gateway
    metrics: NodeMetrics
    engines: Engines
    pages: ServerMetrics

    async def run(self, *tasks: Task) -> None:
        """Submit tasks, and wait until all have ended."""
        await self.control.submit(tasks)
        left = sum(each.samples for each in tasks)
        query = ResultQuery(after=0, wait_s=60, task=tuple(each.id for each in tasks))
        while left > 0:
            page = await self.control.results(query)
            assert page.items, "nothing has ended within a minute"
            left, query = left - len(page.items), replace(query, after=page.cursor)


@contextlib.asynccontextmanager
async def deploy(
    folder: Path,
    play: Play | None = None,
    tracer: Tracer | None = None,
    parts: Parts | None = None,
    lease_s: float = 30.0,
    control: ControlPlane | None = None,
) -> AsyncIterator[Deployment]:
    """A server, unless `control` of one is given, and a node that run while the block lasts."""
    engine = ScriptedEngine(play or reply_with("Hello."), vocab_size=RENDERING.tokenizer.size)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        url = await enter(serve(create_app(engine, model_name="scripted")))
        if control is None:
            store = f"sqlite:{folder / 'server.db'}"
            control = await enter(make_control(store, folder, lease_s=lease_s))
        pages = ServerMetrics(control.database)
        gateway = await enter(
            Gateway(Upstream([url], Embedded()), RENDERING, folder / "recordings")
        )
        settings = NodeSettings(name="here", slots=2, grace_s=0.0)
        engines = await enter(Engines([url]))
        node = Node(
            control.dispatcher,
            gateway,
            parts or Parts(),
            folder / "node",
            settings,
            tracer=tracer,
            engines=engines,
        )
        metrics = NodeMetrics(node, engines)
        pages.nodes.append(metrics)
        working = asyncio.create_task(node.run())
        try:
            await until(lambda: node.id, 20)
            yield Deployment(control, node, gateway, metrics, engines, pages)
        finally:
            node.drain()
            await asyncio.wait_for(working, 20)
