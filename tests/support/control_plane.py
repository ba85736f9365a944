"""Tasks, results, a clock and an idle node, for tests of the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from msgspec.structs import replace

from support.polling import until
from support.server import encode_result
from tugline.protocol import (
    Commit,
    HeldSession,
    LeaseRequest,
    LeaseResponse,
    NodeRegistration,
    Page,
    Release,
    Renewal,
    Work,
)
from tugline.server.control import ControlPlane, expire
from tugline.server.store import results, sessions, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.store.results import End
from tugline.types import HANDLING, Boundary, Cause, Failure, Session, Status, Task

Open = Callable[..., ControlPlane]
"""Makes a control plane on the same store, as often as it is called."""
on_postgres = pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
"""Runs a test on PostgreSQL, the only store that several servers can share."""
Earlier = Callable[[int], AbstractAsyncContextManager[Database]]
"""Opens the store of a test with an earlier layout, of so many steps."""


def make_result(
    of: Session,
    failure: Boundary | Cause | None = None,
    *,
    reward: float | None = 1.0,
    **fields: Any,
) -> bytes:
    """An encoded result, as a node commits it."""
    if failure is not None:
        cause = failure if isinstance(failure, Cause) else None
        boundary = HANDLING[cause].boundary if cause else Boundary(failure)
        fields |= {"status": Status.FAILED, "failure": Failure(boundary, "it broke", cause)}
        reward = None
    return encode_result(of.id, of.task, of.sample, reward, **fields)


def submit(tx: Tx, *batch: Task) -> None:
    """Submit tasks together."""
    tasks.submit(tx, [tasks.pack(task) for task in batch])


def finish(
    tx: Tx, session: str, reward: float | None = None, failure: str = "", **end: Any
) -> None:
    """End a session, with a failure if its text is given."""
    status = Status.FAILED if failure else Status.COMPLETED
    broken = Failure(Boundary.AGENT, failure) if failure else None
    results.finish(tx, sessions.get(tx, session), End(status, broken, reward, **end))


@contextlib.contextmanager
def record_statements(tx: Tx) -> Iterator[list[str]]:
    """SQL statements that run inside the block."""
    seen: list[str] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda sql, *values, **named: seen.append(sql) or call(sql, *values, **named)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute", "many"):
            patch.setattr(tx, name, noted(getattr(tx, name)))
        yield seen


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes inside the block, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def read_pages(control: ControlPlane, op: Callable[..., Page], query: Any) -> list[str]:
    """Ids on all pages from `query` on."""
    ids: list[str] = []
    while True:
        page = await control.database.read(op, query)
        ids += [one.id for one in (*page.tasks, *page.sessions)]
        if page.next is None:
            return ids
        query = replace(query, after=page.next)


class Clock:
    """A database clock that a test can move forward."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        """Unix seconds."""
        return time.time() + self.ahead_s


async def pass_time(control: ControlPlane, seconds: float, *, lease_s: float = 30.0) -> None:
    """Move the clock of a control plane's database forward, and expire what is due."""
    control.database.clock.ahead_s += seconds
    await control.database.write(expire, lease_s=lease_s)


class IdleNode:
    """A node that holds its leases until a test commits or releases them."""

    def __init__(self, control: ControlPlane, node: str, room: int) -> None:
        self.control, self.node, self.room = control, node, room
        self.held: dict[str, Session] = {}
        self.applied = 0
        self.problem: str | None = None
        """Problem that it reports with each request."""

    @classmethod
    async def join(
        cls, control: ControlPlane, name: str = "node", *, room: int = 8, **fields: str
    ) -> IdleNode:
        """Register a node."""
        hello = NodeRegistration(name=name, slots=room, capacity=room, **fields)
        welcome = await control.dispatcher.register(hello)
        idler = cls(control, welcome.node, room)
        idler.applied = welcome.control.generation
        return idler

    @classmethod
    async def at_work(
        cls, control: ControlPlane, *tasks: Task, name: str = "node", room: int = 8
    ) -> IdleNode:
        """Register a node, submit tasks and lease as many of their sessions as it has room for."""
        node = await cls.join(control, name, room=room)
        await control.submit(tasks)
        await node.ask()
        return node

    async def ask(self, *, wait_s: float = 5.0, room: int | None = None) -> LeaseResponse:
        """Request a lease; holds the granted work."""
        left = self.room - len(self.held) if room is None else room
        ask = LeaseRequest(
            capacity=left,
            held=self._holding(),
            applied=self.applied,
            problem=self.problem,
            wait_s=wait_s,
        )
        orders = await self.control.dispatcher.lease(self.node, ask)
        self.held |= {work.session.id: work.session for work in orders.work}
        return orders

    async def start_asking(self, **settings: Any) -> asyncio.Task[LeaseResponse]:
        """Request a lease; returns once the request waits at the server."""
        asking = asyncio.create_task(self.ask(**{"wait_s": 60.0, **settings}))
        await until(lambda: f"node:{self.node}" in self.control.database.hub.topics)
        await self.control.database.write(lambda _tx: None)  # the node's renewal is committed
        await asyncio.sleep(0.01)
        return asking

    async def renew(self) -> LeaseResponse:
        """Send a heartbeat."""
        return await self.control.dispatcher.renew(
            self.node, Renewal(held=self._holding(), applied=self.applied, problem=self.problem)
        )

    async def commit(self, session: str, **outcome: Any) -> Commit:
        """Commit a result of a held session."""
        leased = self.held.pop(session)
        return await self.control.dispatcher.commit(
            session, leased.epoch, make_result(leased, **outcome)
        )

    async def release(
        self, session: str, reason: str = "it drains", boundary: Boundary | None = None
    ) -> None:
        """Return a held session to the queue."""
        back = Release(epoch=self.held[session].epoch, reason=reason, boundary=boundary)
        await self.control.dispatcher.release(session, back)

    def _holding(self) -> tuple[HeldSession, ...]:
        return tuple(HeldSession(one.id, one.epoch, Status.RUN) for one in self.held.values())


def session_ids(work: tuple[Work, ...]) -> list[str]:
    """Ids of the sessions."""
    return [one.session.id for one in work]
