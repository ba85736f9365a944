"""A real server on a real socket that can be restarted, and helpers that act as its nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from support.control_plane import a_task
from support.server import TOKENS, result, serve
from tugline.client.api import Client
from tugline.client.nodes import NodeClient
from tugline.protocol import HeldSession, LeaseRequest, NodeRegistration, Work
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api
from tugline.types import Status, Task


class LiveServer:
    """A server that can be stopped and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url, self.port = folder, "", 0
        self.control: ControlPlane
        self.app: Api
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start it with what is in the folder."""
        store = f"sqlite:{self.folder / 'server.db'}"
        served = await self._stack.enter_async_context(
            serve(store, self.folder, port=self.port, lease_s=10.0)
        )
        self.url, self.app, self.control = served.url, served.app, served.control
        self.port = int(self.url.rpartition(":")[2])

    async def stop(self) -> None:
        """Stop it and close all connections."""
        await self._stack.aclose()

    def client(self, **how: float) -> Client:
        """A client that may submit."""
        return Client(self.url, TOKENS.client, **how)

    async def finish(self, *, limit: int = 100, wait_s: float = 5.0, **rewards: float) -> list[str]:
        """Finish queued sessions as a node; `rewards` by session, with ``_`` for ``-``."""
        async with leased(self.url, limit, wait_s) as (node, _, *work):
            for one in work:
                await commit(node, one, rewards.get(one.session.id.replace("-", "_"), 1.0))
            return [one.session.id for one in work]


@contextlib.asynccontextmanager
async def leased(
    url: str, room: int = 1, wait_s: float = 5.0
) -> AsyncIterator[tuple[NodeClient, str, *tuple[Work, ...]]]:
    """Lease queued sessions as a node; its connection, its id, and the sessions."""
    async with NodeClient(url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="n", slots=room, capacity=room))
        ask = LeaseRequest(capacity=room, applied=welcome.control.generation, wait_s=wait_s)
        yield node, welcome.node, *(await node.lease(welcome.node, ask)).work


async def commit(node: NodeClient, work: Work, reward: float = 1.0) -> None:
    """Commit a result of this session."""
    of = work.session
    await node.commit(of.id, of.epoch, result(of.id, of.task, of.sample, reward))


def held(*work: Work) -> tuple[HeldSession, ...]:
    """Sessions as a node reports them."""
    return tuple(HeldSession(one.session.id, one.session.epoch, Status.RUN) for one in work)


def task(name: str = "t", **changes: object) -> Task:
    """A task of one sample."""
    return a_task(name, **changes)
