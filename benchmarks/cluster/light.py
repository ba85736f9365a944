"""Light nodes: they use the protocol and client of real nodes, but run no sessions.

Each node registers, keeps one lease request open that lists the sessions it holds, and renews after
a third of its lease. It commits a result for each session immediately, or, if the fleet holds
sessions, keeps them leased.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tugline import protocol
from tugline.client.nodes import NodeClient
from tugline.errors import FencedError, ServerError
from tugline.recording.trajectories import pack
from tugline.types import Ledger, Reward, Session, Status, Trajectory

COMMITS = 64
"""Concurrent commits of all nodes together."""
JOINING = 32
"""Concurrent registrations."""


class Fleet:
    """`count` light nodes of `slots` each, spread evenly over the servers at `urls`."""

    def __init__(self, urls: Sequence[str], join_token: str, *, count: int, slots: int) -> None:
        self.slots, self.holds_sessions = slots, False
        self.leased: dict[str, float] = {}
        """Time of the last lease of each session, in seconds of the monotonic clock."""
        self.committed = self.rejoined = 0
        self.errors: list[str] = []
        self.commits, self.joins = asyncio.Semaphore(COMMITS), asyncio.Semaphore(JOINING)
        self.progress = asyncio.Event()
        self.nodes = [
            LightNode(self, NodeClient(urls[n % len(urls)], join_token), f"light{n}")
            for n in range(count)
        ]

    async def start(self) -> None:
        """Start all nodes; return when all are registered."""
        for node in self.nodes:
            node.start()
        await asyncio.gather(*(node.joined.wait() for node in self.nodes))

    async def kill(self, nodes: Sequence[LightNode]) -> None:
        """Stop these nodes without releasing their sessions, as a power cut does."""
        for node in nodes:
            node.task.cancel()
        await asyncio.gather(*(node.task for node in nodes), return_exceptions=True)

    def describe_errors(self) -> str:
        """Number of failed calls (after all retries) and the first error; empty without any."""
        return f"{len(self.errors)} calls failed, first {self.errors[0]}" if self.errors else ""


class LightNode:
    """One light node."""

    task: asyncio.Task[None]

    def __init__(self, fleet: Fleet, client: NodeClient, name: str) -> None:
        self.name, self.joined = name, asyncio.Event()
        self.held: dict[str, Session] = {}
        self._fleet, self._client, self._id = fleet, client, ""
        self._applied, self._freed = 0, asyncio.Event()
        self._ends: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to join and work."""
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._client:
            while True:
                try:
                    await self._work_as_member()
                except* FencedError:  # like a real node: drop all sessions and register again
                    self.held.clear()
                    self._fleet.rejoined += 1
                except* ServerError as group:
                    self._fleet.errors.append(str(group.exceptions[0]))

    async def _work_as_member(self) -> None:
        async with self._fleet.joins:
            registration = protocol.NodeRegistration(
                name=self.name, slots=self._fleet.slots, capacity=self._fleet.slots
            )
            registered = await self._client.register(registration)
        self._id, self._applied = registered.node, registered.control.generation
        self.joined.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(registered.lease_s / 3))
            group.create_task(self._lease())

    async def _renew(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            renewal = protocol.Renewal(held=self._list_held(), applied=self._applied)
            self._follow(await self._client.renew(self._id, renewal))

    async def _lease(self) -> None:
        """Keep a lease request open; replace one without capacity when a session ends."""
        while True:
            self._freed.clear()
            capacity = self._fleet.slots - len(self.held)
            lease = protocol.LeaseRequest(
                capacity=capacity, held=self._list_held(), applied=self._applied
            )
            request = asyncio.ensure_future(self._client.lease(self._id, lease))
            freed = asyncio.ensure_future(self._freed.wait())
            try:
                waits_for = {request} if capacity else {request, freed}
                await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
                if request.done():
                    self._follow(request.result())
            finally:
                for each in (request, freed):
                    each.cancel()
                await asyncio.gather(request, freed, return_exceptions=True)

    def _list_held(self) -> tuple[protocol.HeldSession, ...]:
        return tuple(
            protocol.HeldSession(session.id, session.epoch, Status.RUN)
            for session in self.held.values()
        )

    def _follow(self, response: protocol.LeaseResponse) -> None:
        self._applied = max(self._applied, response.control.generation)
        for stop in response.stop:
            self.held.pop(stop.session, None)
        for work in response.work:
            session = work.session
            self.held[session.id] = session
            self._fleet.leased[session.id] = time.monotonic()
            if not self._fleet.holds_sessions:
                task = asyncio.create_task(self._commit(session))
                self._ends.add(task)
                task.add_done_callback(self._ends.discard)
        if response.work:
            self._fleet.progress.set()

    async def _commit(self, session: Session) -> None:
        trajectory = Trajectory(
            session=session.id,
            task=session.task,
            sample=session.sample,
            status=Status.COMPLETED,
            traces=(),
            ledger=Ledger(),
            reward=Reward(1.0),
        )
        try:
            async with self._fleet.commits:
                await self._client.commit(session.id, session.epoch, pack(trajectory))
            self._fleet.committed += 1
        except ServerError as error:
            self._fleet.errors.append(str(error))
        self.held.pop(session.id, None)
        self._freed.set()
        self._fleet.progress.set()
