"""From the queue to the nodes: who asks for work waits here until there is some (I3).

Every node keeps one question outstanding. All that wait are served together, in one transaction, at
the moment when work comes in: nothing is polled, and the dispatch delay is that of one commit. A
question is also answered at once when its node has something else to do: to stop a session, to
pause, to go. What a node was told once it is not told at once again, so a node that takes its time
does not go round in circles; renewals repeat everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tugline import log
from tugline.errors import StoreError
from tugline.protocol import HeldSession, LeaseRequest, LeaseResponse, Renewal, Stop, Work
from tugline.server.hub import Subscription
from tugline.server.store import leases, nodes, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.store.leases import Heard
from tugline.types import Session, Task

LONGEST_S = 60.0
"""No question waits longer, whatever it asks for."""
_BODIES = 64
_PAUSE_S = 0.2
_log = log.get("server")


@dataclass(eq=False)
class _Asker:
    """A node that waits for work."""

    node: str
    capacity: int
    bell: Subscription
    given: list[Session] = field(default_factory=list)


class _Told(NamedTuple):
    """What a node knows from its last answer."""

    stop: frozenset[Stop] = frozenset()
    generation: int = 0
    draining: bool = False
    follow: frozenset[str] = frozenset()


class Dispatch:
    """Answers nodes; `followed` says whose logs are read now. Rounds go on while it is open."""

    def __init__(
        self, database: Database, *, lease_s: float, followed: Callable[[], Collection[str]]
    ) -> None:
        self._database, self._lease_s, self._followed = database, lease_s, followed
        self._waiting: dict[str, _Asker] = {}
        self._told: dict[str, _Told] = {}
        self._bodies: OrderedDict[str, Task] = OrderedDict()
        self._asked = Subscription()

    async def __aenter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._moved = self._stack.enter_context(self._database.hub.listen("nodes"))
        self._rounds = asyncio.create_task(self._serve())

    async def __aexit__(self, *_exc: object) -> None:
        self._rounds.cancel()
        await asyncio.wait({self._rounds})
        self._stack.close()

    async def lease(self, node: str, ask: LeaseRequest) -> LeaseResponse:
        """Work, or anything else that this node must know, or nothing when its time is over."""
        until = asyncio.get_running_loop().time() + min(ask.wait_s, LONGEST_S)
        with self._database.hub.listen(f"node:{node}", "control") as bell:
            heard = await self._hear(node, ask.held, ask.applied)
            asker = _Asker(node, ask.capacity - len(heard.again), bell)
            with self._parked(asker):
                while not (heard.again or self._news(node, heard, ask)):
                    rung = await bell.heard(until)
                    if asker.given or not rung:
                        break
                    # What it holds may have changed since it asked, so this renews nothing.
                    hear = partial(leases.hear, node=node, held=ask.held)
                    heard = await self._database.read(hear)
        return await self._orders(node, heard, ask.held, (*heard.again, *asker.given))

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Everything this node must know, but no work."""
        heard = await self._hear(node, renewal.held, renewal.applied)
        return await self._orders(node, heard, renewal.held, ())

    # ------------------------------------------------------------------ one question
    async def _hear(self, node: str, held: Sequence[HeldSession], applied: int) -> Heard:
        now = time.time()

        def op(tx: Tx) -> Heard:
            nodes.renew(tx, node, applied, now=now, lease_s=self._lease_s)
            return leases.hear(tx, node, held, advance_at=now)

        return await self._database.write(op, durable=False)

    @contextlib.contextmanager
    def _parked(self, asker: _Asker) -> Iterator[None]:
        """Let it take part in the rounds. A newer question of the same node takes its place."""
        if asker.capacity > 0:
            self._waiting[asker.node] = asker
            self._asked.ring()
        try:
            yield
        finally:
            if self._waiting.get(asker.node) is asker:
                del self._waiting[asker.node]

    def _news(self, node: str, heard: Heard, ask: LeaseRequest) -> bool:
        if self._moved.take():  # nodes come and go: tell once more rather than keep all for ever
            self._told.clear()
        told, now = self._told.get(node, _Told()), self._telling(heard, ask.held)
        return bool(
            now.stop - told.stop
            or now.generation > max(ask.applied, told.generation)
            or now.draining > told.draining
            or now.follow - told.follow
        )

    def _telling(self, heard: Heard, held: Sequence[HeldSession]) -> _Told:
        follow = {one.session for one in held}.intersection(self._followed())
        return _Told(
            frozenset(heard.stop), heard.control.generation, heard.draining, frozenset(follow)
        )

    async def _orders(
        self, node: str, heard: Heard, held: Sequence[HeldSession], given: Sequence[Session]
    ) -> LeaseResponse:
        bodies = await self._tasks({session.task for session in given})
        told = self._told[node] = self._telling(heard, held)
        return LeaseResponse(
            work=tuple(
                Work(session, bodies[session.task])
                for session in {session.id: session for session in given}.values()
            ),
            stop=heard.stop,
            control=heard.control,
            draining=heard.draining,
            follow=tuple(sorted(told.follow)),
        )

    async def _tasks(self, ids: set[str]) -> dict[str, Task]:
        found = {task: self._bodies[task] for task in ids if task in self._bodies}
        absent = ids - found.keys()
        if absent:
            found |= await self._database.read(
                lambda tx: {task: tasks.body(tx, task) for task in absent}
            )
        for task in ids:
            self._bodies[task] = found[task]
            self._bodies.move_to_end(task)
        while len(self._bodies) > _BODIES:
            self._bodies.popitem(last=False)
        return found

    # ------------------------------------------------------------------ the rounds
    async def _serve(self) -> None:
        with self._database.hub.listen("work") as work:
            self._asked = work
            while True:
                await work.heard()
                try:
                    await self._round()
                except Exception as error:  # noqa: BLE001 - without rounds nobody ever gets work
                    known = isinstance(error, StoreError)
                    _log.error("nothing is given out", error=str(error), exc_info=not known)
                    await asyncio.sleep(_PAUSE_S)
                    work.ring()

    async def _round(self) -> None:
        askers = dict(self._waiting)
        if not askers:
            return
        capacities = {node: asker.capacity for node, asker in askers.items()}
        given = await self._database.write(
            partial(leases.give, capacities=capacities, now=time.time())
        )
        for node, sessions in given.items():
            asker = askers[node]
            if self._waiting.get(node) is asker:
                del self._waiting[node]
                asker.given = sessions
                asker.bell.ring()
            else:  # it gave up meanwhile; its next question says that it has not got them
                self._database.hub.wake([f"node:{node}"])
