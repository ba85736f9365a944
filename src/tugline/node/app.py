"""A node, which leases sessions from a server, runs them and commits their results.

`Node.run` cleans up after a dead process, offers its results, registers, and works until drained.
Leasing (one request is always open), renewing, housekeeping and log transfer run in separate tasks,
so that none delays another.

The server may be unreachable for any time: sessions continue, and their results wait in the journal
(I3). The server decides whether a lease was lost meanwhile; epochs fence late results.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec.structs import replace

from tugline import log, protocol
from tugline.aio import run_beside, run_until_one_ends
from tugline.atomic import read_or_make
from tugline.errors import EngineError, FencedError, ServerError
from tugline.gateway.app import Gateway
from tugline.node.active_sessions import StopReason
from tugline.node.admission import Admission, Engines
from tugline.node.health import Canary, Health
from tugline.node.housekeeping import Housekeeping
from tugline.node.pools import Pools
from tugline.node.retries import RetryingDispatcher
from tugline.node.session_runner import SessionRunner
from tugline.node.settings import NodeSettings
from tugline.node.telemetry import LoadSampler, Stats, Tracer
from tugline.rollout.parts import Parts
from tugline.schema import copy_fields

_CONTROL_POLL_S = 0.25
"""Seconds between lease requests while a control is being applied."""
_PAUSE_LOG_S = 5.0
"""Seconds between log messages while calls in flight delay a pause."""
_log = log.get("node")


class Controls:
    """Applies the server's newest control: pause model calls while weights change, then resume.

    A control is applied in the background and reported only once it is in force, because the
    server's barrier relies on that. A newer control replaces one that is still being applied.
    """

    def __init__(self, gateway: Gateway, pause_timeouts: Callable[..., None]) -> None:
        self._gateway = gateway
        self._pause_timeouts = pause_timeouts
        self._requested = protocol.Control()
        self._current = protocol.Control()
        self._applying: asyncio.Task[None] | None = None

    @property
    def applied(self) -> int:
        """Generation that is in force."""
        return self._current.generation

    @property
    def is_settled(self) -> bool:
        """Whether no control is being applied."""
        return self._applying is None or self._applying.done()

    def apply(self, control: protocol.Control) -> None:
        """Start to apply `control`, unless it is the last one requested."""
        if control == self._requested:
            return
        self.close()
        self._requested = control
        self._applying = log.start_task(self._apply(control), "node-control")

    async def wait(self, within_s: float) -> None:
        """Wait until the control is applied, at most `within_s` seconds."""
        if self._applying is not None:
            await asyncio.wait({self._applying}, timeout=within_s)

    def close(self) -> None:
        """Stop applying."""
        if self._applying is not None:
            self._applying.cancel()

    async def _apply(self, control: protocol.Control) -> None:
        if control.version != self._current.version:
            await self._gateway.set_weights_version(control.version)
        if control.paused is None:
            await self._gateway.resume()
            self._pause_timeouts(paused=False)
        else:
            self._pause_timeouts(paused=True)
            await self._pause(control.paused)
        self._current = control

    async def _pause(self, mode: protocol.PauseMode) -> None:
        while True:
            try:
                return await self._gateway.pause(mode, within_s=_PAUSE_LOG_S)
            except EngineError as error:
                _log.warning("not paused yet", mode=mode, error=str(error))


class Node:
    """Runs sessions in ``folder/sessions`` and keeps results in ``folder/journal``; see `run`."""

    leave_s = 10.0
    """Seconds for results to reach the server after the grace time of a drain."""

    def __init__(  # noqa: PLR0913 - the server, the parts of sessions, and telemetry
        self,
        server: protocol.Dispatcher,
        gateway: Gateway,
        parts: Parts,
        folder: Path,
        settings: NodeSettings,
        recordings: Path | None = None,
        *,
        tracer: Tracer | None = None,
        engines: Engines | None = None,
    ) -> None:
        """Create a node; `recordings`, the gateway's folder, has the same retention as sessions.

        `engines` are polled for admission.
        """
        self.stats = Stats()
        self.settings = settings
        self.gateway = gateway
        self.parts = parts
        self._server = server
        self._folder = folder
        self._instance = ""
        self._changed = asyncio.Event()
        self._dispatcher = RetryingDispatcher(server, self.stats)
        admission = Admission(
            engines.poll if engines and engines.loads else None,
            waiting=settings.engine_waiting,
            kv=settings.engine_kv,
        )
        self.pools = Pools(settings, admission, self._changed.set)
        self._sampler = LoadSampler(self.pools, engines.loads if engines else {})
        canary = Canary(gateway, parts, folder / "sessions")
        self.health = Health(canary.run, self._changed.set)
        self.runner = SessionRunner(
            self._dispatcher,
            gateway,
            parts,
            folder,
            self.pools,
            stats=self.stats,
            tracer=tracer,
            on_ended=self._changed.set,
            on_result=self.health.note_result,
        )
        self._controls = Controls(gateway, self.runner.pause_timeouts)
        sessions = folder / "sessions"
        is_needed = self.runner.is_needed
        self._disk = Housekeeping(sessions, recordings, settings, self.stats, is_needed)
        self._draining = asyncio.Event()
        self._drain_reported = ""
        """Node id with which the drain was reported to the server; empty before."""
        self.id = ""
        """Id at the server; empty before the registration."""
        self.check: Callable[[], str | None] = lambda: None
        """Returns why sandboxes cannot start; called at each registration. Blocks."""

    # ----------------------------------------------------------------------- life cycle
    async def run(self) -> None:
        """Work until drained; if cancelled, end all sessions and leave results in the journal.

        Raises `ServerError` if the server refuses this node.
        """
        log.bind(node=self.settings.name)
        pending = self.runner.journal.list_pending()
        await asyncio.to_thread(self._disk.reap, self.parts, pending)
        self._instance = await asyncio.to_thread(
            read_or_make, self._folder / "instance", lambda: secrets.token_hex(8)
        )
        async with run_beside(self._disk.run(), self.runner.logs.run(), self.health.run()):
            try:
                await run_until_one_ends(self._work(), self._wait_until_drained())
            finally:
                self._controls.close()
                await self.runner.close()

    def drain(self) -> None:
        """Take no more work, let sessions finish within the grace time, release the rest, end."""
        self._draining.set()
        self._changed.set()

    @property
    def draining(self) -> bool:
        """Whether the node takes no more work."""
        return self._draining.is_set()

    async def _work(self) -> None:
        await self.runner.offer_pending()
        while not await self._work_as_member():
            self.stats.rejoined += 1

    async def _work_as_member(self) -> bool:
        """Register and work; return True when drained, False if the node's lease was lost."""
        problem = await asyncio.to_thread(self.check)
        self.health.set_problem(problem or "")
        registration = copy_fields(
            protocol.NodeRegistration,
            self.settings,
            gateway=self.gateway.url,
            instance=self._instance,
            problem=self.health.problem,
        )
        registered = await self._dispatcher.call(lambda: self._server.register(registration))
        self.id = registered.node
        self._controls.apply(registered.control)
        _log.info("registered", node=self.id, name=self.settings.name)
        try:
            await run_until_one_ends(self._renew(registered), self._lease(registered.node))
        except ServerError as error:
            if not isinstance(error, FencedError) and error.status not in {401, 403}:
                raise
            _log.warning("the node's lease is lost", node=self.id, error=str(error))
            self.runner.stop_all(StopReason.DROP)
            return False
        return True

    async def _wait_until_drained(self) -> None:
        """Wait for `drain`; release sessions before RUN, and the others after the grace time."""
        await self._draining.wait()
        _log.info("draining", node=self.id, sessions=len(self.runner.sessions))
        self.runner.stop_all(StopReason.DRAIN, started=False)
        await self.runner.wait_until_empty(self.settings.grace_s)
        self.runner.stop_all(StopReason.DRAIN)
        await self.runner.wait_until_empty(self.leave_s)
        if self.id:  # `_lease` ends before this, unless the server is unreachable
            await asyncio.sleep(self.leave_s)

    # ----------------------------------------------------------------------- the lease
    async def _lease(self, node: str) -> None:
        """Keep one lease request open; return when the node is drained."""
        while not (self.draining and not self.runner.sessions):
            if self.draining and self._drain_reported != node:
                await self._dispatcher.call(lambda: self._server.drain(node))
                self._drain_reported = node
            response = await self._request_lease(node)
            if response is not None:
                self._follow_orders(response)
            await self._controls.wait(_CONTROL_POLL_S)

    async def _request_lease(self, node: str) -> protocol.LeaseResponse | None:
        """Request work; return the response, or None if the request was outdated before it came."""
        self._changed.clear()
        room = self._count_room()
        problem = self.health.problem
        # While a control is being applied, a waiting request would be answered at once.
        wait_s = protocol.LEASE_WAIT_S if self._controls.is_settled else 0.0

        def lease() -> Awaitable[protocol.LeaseResponse]:
            renewal = self._make_renewal()
            body = copy_fields(protocol.LeaseRequest, renewal, capacity=room, wait_s=wait_s)
            return self._server.lease(node, body)

        request = asyncio.create_task(self._dispatcher.call(lease))
        request.add_done_callback(lambda _: self._changed.set())
        try:
            while not request.done() and not self._is_outdated(room, problem):
                await self._changed.wait()
                self._changed.clear()
            return request.result() if request.done() else None
        finally:
            request.cancel()
            await asyncio.wait({request})

    def _is_outdated(self, room: int, problem: str) -> bool:
        """Return whether an open lease request with these values should be replaced."""
        if problem != self.health.problem:
            return True
        if self.draining:
            return room > 0 or not self.runner.sessions or self._drain_reported != self.id
        return room == 0 and self._count_room() > 0

    def _count_room(self) -> int:
        closed = self.draining or self.stats.disk_low or not self._controls.is_settled
        return 0 if closed else self.pools.count_room()

    def _make_renewal(self) -> protocol.Renewal:
        return protocol.Renewal(
            held=self.runner.list_held(),
            applied=self._controls.applied,
            problem=self.health.problem,
        )

    async def _renew(self, registered: protocol.NodeRegistered) -> None:
        def renew() -> Awaitable[protocol.LeaseResponse]:
            renewal = replace(self._make_renewal(), sample=self._sampler.take())
            return self._server.renew(registered.node, renewal)

        while True:
            await asyncio.sleep(registered.lease_s / 3)
            self._follow_orders(await self._dispatcher.call(renew))

    def _follow_orders(self, response: protocol.LeaseResponse) -> None:
        for stop in response.stop:
            self.runner.stop(stop)
        for work in response.work:
            self.runner.start(work)
        self._controls.apply(response.control)
        self.runner.logs.follow(response.follow)
        if response.draining and not self.draining:
            self.drain()
        if self.draining and response.work:
            self.runner.stop_all(StopReason.DRAIN, started=False)
