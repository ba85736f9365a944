"""A node: takes sessions from a server, leads them through their stages, commits what came of them.

`Node.run` reads like its life: end what a dead predecessor left, offer the results it had, join,
work until drained. Beside the sessions go on, each in a task of its own so that none waits for
another: asking for work (one question is always open), renewing the lease, looking after the disk,
sending the logs that somebody reads.

The server may be away for as long as it likes: sessions go on and their results wait in the
journal (I3). Whether a lease was lost meanwhile is the server's to say; epochs fence what is late.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tugline import log
from tugline.errors import FencedError, ServerError
from tugline.node.active_sessions import StopReason
from tugline.node.control import Controls, Pausable
from tugline.node.dispatcher import RetryingDispatcher
from tugline.node.housekeeping import Housekeeping
from tugline.node.session_runner import SessionRunner
from tugline.node.settings import NodeSettings
from tugline.node.stats import Observer, Stats
from tugline.protocol import (
    LEASE_WAIT_S,
    Dispatcher,
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    Renewal,
)
from tugline.rollout.parts import Parts

_SETTLE_S = 0.25
"""How often the server is asked while a control is being put in place."""
_LEAVE_S = 10.0
"""How long what is left may take to reach the server once the grace of a drain is over."""
_log = log.get("node")


class Node:
    """Runs sessions in ``folder/sessions`` and keeps results in ``folder/journal``; see `run`."""

    def __init__(  # noqa: PLR0913 - what it works for, with, in and by, and who watches
        self,
        dispatcher: Dispatcher,
        gateway: Pausable,
        parts: Parts,
        folder: Path,
        settings: NodeSettings,
        *,
        recordings: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`recordings` is the gateway's folder of recordings, kept as long as the sessions are."""
        self.stats = Stats()
        self.settings = settings
        self._gateway, self._parts, self._server = gateway, parts, dispatcher
        self._changed = asyncio.Event()
        self._link = RetryingDispatcher(dispatcher, self.stats)
        self.crew = SessionRunner(
            self._link,
            gateway,
            parts,
            folder,
            settings,
            stats=self.stats,
            observer=observer,
            changed=self._changed.set,
        )
        self.stages = self.crew.stages
        self._controls = Controls(gateway, self.crew.pause)
        sessions = folder / "sessions"
        self._disk = Housekeeping(sessions, recordings, settings, self.stats, self.crew.is_needed)
        self._draining = asyncio.Event()
        self._said_so = ""
        """As which node it has told the server that it drains."""
        self.id = ""
        """As the server calls it, once it has joined."""

    # ----------------------------------------------------------------------- its life
    async def run(self) -> None:
        """Work until drained; when cancelled, end all sessions and leave what is not committed.

        Raises `ServerError` when the server refuses this node.
        """
        log.bind(node=self.settings.name)
        kept = [f"{session}.{epoch}" for session, epoch in self.crew.journal.left()]
        await asyncio.to_thread(self._disk.reap, self._parts, kept)
        beside = [
            asyncio.create_task(self._disk.run(), name="node-disk"),
            asyncio.create_task(self.crew.logs.run(), name="node-logs"),
        ]
        ways = {
            asyncio.create_task(self._work(), name="node-work"),
            asyncio.create_task(self._drained(), name="node-drain"),
        }
        try:
            ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            self._controls.close()
            for task in (*beside, *ways):
                task.cancel()
            await self.crew.close()
            await asyncio.wait((*beside, *ways))

    def drain(self) -> None:
        """Take no more work, finish what runs within the grace, hand back the rest, end."""
        self._draining.set()
        self._changed.set()

    @property
    def draining(self) -> bool:
        """Whether it takes no more work."""
        return self._draining.is_set()

    async def _work(self) -> None:
        await self.crew.offer()
        while not await self._member():
            self.stats.rejoined += 1

    async def _member(self) -> bool:
        """Join and work; True when drained, False if the lease was lost and it must join again."""
        welcome = await self._link.answer(lambda: self._server.register(self._hello()))
        self.id = welcome.node
        self._controls.put(welcome.control)
        _log.info("joined", node=self.id, name=self.settings.name)
        tasks = {
            asyncio.create_task(self._renew(welcome), name="node-renew"),
            asyncio.create_task(self._lease(welcome.node), name="node-lease"),
        }
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        try:
            for task in ended:
                task.result()
        except ServerError as error:
            if not isinstance(error, FencedError) and error.status not in {401, 403}:
                raise
            _log.warning("the node's lease is lost", node=self.id, error=str(error))
            self.crew.call_off(StopReason.DROP)
            return False
        return True

    def _hello(self) -> NodeRegistration:
        own = self.settings
        return NodeRegistration(
            name=own.name,
            slots=own.slots,
            capacity=own.room,
            gateway=self._gateway.url,
            labels=own.labels,
            versions=own.versions,
        )

    async def _drained(self) -> None:
        """Once it is to end: what has not started goes back now, the rest when time is over."""
        await self._draining.wait()
        _log.info("draining", node=self.id, sessions=len(self.crew.live))
        self.crew.call_off(StopReason.DRAIN, started=False)
        await self.crew.empty(self.settings.grace_s)
        self.crew.call_off(StopReason.DRAIN)
        await self.crew.empty(_LEAVE_S)
        if self.id:  # a server that is away is not waited for
            await asyncio.sleep(_LEAVE_S)

    # ----------------------------------------------------------------------- the lease
    async def _lease(self, node: str) -> None:
        """Keep one question open; returns when the node is drained."""
        while not (self.draining and not self.crew.live):
            if self.draining and self._said_so != node:
                await self._link.answer(lambda: self._server.drain(node))
                self._said_so = node
            orders = await self._ask(node)
            if orders is not None:
                self._obey(orders)
            if not self._controls.settled:
                await self._controls.wait(_SETTLE_S)

    async def _ask(self, node: str) -> LeaseResponse | None:
        """The server's answer; None if the question was out of date before that came."""
        self._changed.clear()
        room = self._room()
        # While a control is being put in place the answer would come at once, again and again.
        wait_s = LEASE_WAIT_S if self._controls.settled else 0.0

        def ask() -> LeaseRequest:
            applied = self._controls.applied
            return LeaseRequest(
                capacity=room, held=self.crew.held(), applied=applied, wait_s=wait_s
            )

        poll = asyncio.create_task(self._link.answer(lambda: self._server.lease(node, ask())))
        try:
            while not poll.done() and not self._outdated(room):
                await self._changed_or(poll)
            return poll.result() if poll.done() else None
        finally:
            poll.cancel()
            await asyncio.wait({poll})

    async def _changed_or(self, poll: asyncio.Task[LeaseResponse]) -> None:
        changed = asyncio.create_task(self._changed.wait())
        both: set[asyncio.Task[Any]] = {poll, changed}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()

    def _outdated(self, room: int) -> bool:
        """Whether an open question for so much room should be asked anew."""
        if self.draining:
            return room > 0 or not self.crew.live or self._said_so != self.id
        return room == 0 and self._room() > 0

    def _room(self) -> int:
        closed = self.draining or self.stats.disk_low or not self._controls.settled
        return 0 if closed else self.crew.stages.room()

    async def _renew(self, welcome: NodeRegistered) -> None:
        def renewal() -> Renewal:
            return Renewal(held=self.crew.held(), applied=self._controls.applied)

        while True:
            await asyncio.sleep(welcome.lease_s / 3)
            self._obey(await self._link.answer(lambda: self._server.renew(welcome.node, renewal())))

    def _obey(self, orders: LeaseResponse) -> None:
        for stop in orders.stop:
            self.crew.stop(stop)
        for work in orders.work:
            self.crew.take(work)
        self._controls.put(orders.control)
        self.crew.logs.follow(orders.follow)
        if orders.draining and not self.draining:
            self.drain()
        if self.draining and orders.work:
            self.crew.call_off(StopReason.DRAIN, started=False)
