"""Light nodes: they speak the protocol of real ones through the same client, and run nothing.

Each registers, keeps one lease request open with all that it holds, renews at a third of its lease
and commits the result of each session at once, or keeps it where the fleet holds sessions.
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
"""Results on their way at once, of all nodes together."""
JOINING = 32
"""Registrations on their way at once."""


class Fleet:
    """`count` light nodes of `slots` each, spread evenly over the servers at `urls`."""

    def __init__(self, urls: Sequence[str], join_token: str, *, count: int, slots: int) -> None:
        self.slots, self.keeps_sessions = slots, False
        self.leased: dict[str, float] = {}
        """When each session came to a node last, seconds of the monotonic clock."""
        self.committed = self.rejoined = 0
        self.errors: list[str] = []
        self.commits, self.joins = asyncio.Semaphore(COMMITS), asyncio.Semaphore(JOINING)
        self.progress = asyncio.Event()
        self.nodes = [
            LightNode(self, NodeClient(urls[n % len(urls)], join_token), f"light{n}")
            for n in range(count)
        ]

    async def start(self) -> None:
        """Start all nodes; returns when each is registered."""
        for node in self.nodes:
            node.start()
        await asyncio.gather(*(node.joined.wait() for node in self.nodes))

    async def kill(self, nodes: Sequence[LightNode]) -> None:
        """End these as a power cut does: nothing is released, nothing is said."""
        for node in nodes:
            node.task.cancel()
        await asyncio.gather(*(node.task for node in nodes), return_exceptions=True)

    def describe_errors(self) -> str:
        """How many calls failed for good, and the first of them; empty without any."""
        return f"{len(self.errors)} calls failed, first {self.errors[0]}" if self.errors else ""


class LightNode:
    """One of them."""

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
                except* FencedError:  # as a real node does: it drops all and registers again
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
        """Keep a request open; one without room is replaced as soon as there is some."""
        while True:
            self._freed.clear()
            room = self._fleet.slots - len(self.held)
            ask = protocol.LeaseRequest(
                capacity=room, held=self._list_held(), applied=self._applied
            )
            request = asyncio.ensure_future(self._client.lease(self._id, ask))
            freed = asyncio.ensure_future(self._freed.wait())
            try:
                waits_for = {request} if room else {request, freed}
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
            if not self._fleet.keeps_sessions:
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
