"""Dispatcher of the server: leases sessions to nodes, stores their results and logs (I3).

Every node keeps one lease request open. All waiting requests are served together, in one
transaction, when work is queued: nothing is polled, and the dispatch delay is that of one commit. A
request is also answered at once for other orders to its node: stop a session, pause, drain. Only
orders that the node has not received yet do so, so that a slow node does not spin; renewals return
all orders.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tugline import log, protocol
from tugline.errors import StoreError
from tugline.server.blobs import Blobs
from tugline.server.logs import Logs
from tugline.server.settings import ServerSettings
from tugline.server.store import leases, nodes, sessions, tasks
from tugline.server.store.database import Database, Subscription
from tugline.server.store.leases import Orders
from tugline.server.validation import check_bounds, compute_digest, read_end
from tugline.types import Session, Task

_PAUSE_S = 0.2
_log = log.get("server")


@dataclass(eq=False)
class _Waiter:
    """Open lease request of a node."""

    capacity: int
    subscription: Subscription
    granted: list[Session] = field(default_factory=list)


class ServerDispatcher:
    """Implementation of `protocol.Dispatcher` on the store; leases sessions while `run` runs."""

    def __init__(self, db: Database, blobs: Blobs, logs: Logs, settings: ServerSettings) -> None:
        self._database = db
        self._blobs = blobs
        self._logs = logs
        self._settings = settings
        self._waiting: dict[str, _Waiter] = {}
        self._known: dict[str, protocol.LeaseResponse] = {}
        """Last response to each node, without work."""
        self._nodes_changed = db.hub.add("nodes")
        limited = any(settings.find_tenant(name).sessions for name in settings.tenants)
        # If tenants have limits, the end of a session lets another node lease the next one.
        self._work = db.hub.add("work", *(["results"] if limited else []))

    async def run(self) -> None:
        """Lease sessions until cancelled."""
        while True:
            await self._work.wait()
            try:
                await self._grant()
            except Exception as error:  # noqa: BLE001 - without this task no node ever gets work
                known = isinstance(error, StoreError)
                text = str(error) if known else log.describe_error(error)
                _log.error("sessions cannot be leased", error=text)
                await asyncio.sleep(_PAUSE_S)
                self._work.notify()

    # ------------------------------------------------------------------ the dispatcher
    async def register(self, registration: protocol.NodeRegistration) -> protocol.NodeRegistered:
        """Add a node. An earlier process of it loses its sessions. Raises `Invalid`, `Conflict`."""
        check_bounds(registration)
        return await self._database.write(leases.register, registration, self._settings.lease_s)

    async def lease(self, node: str, request: protocol.LeaseRequest) -> protocol.LeaseResponse:
        """Wait for work or orders; the response is empty if there are none within `wait_s`."""
        until = asyncio.get_running_loop().time() + request.wait_s
        with self._database.hub.subscribe(f"node:{node}", "control") as subscription:
            again, orders = await self._renew(node, request)
            waiter = _Waiter(request.capacity - len(again), subscription)
            if waiter.capacity > 0:  # replaces an earlier request of the node
                self._waiting[node] = waiter
                self._work.notify()
            try:
                while not (again or self._has_news(node, orders, request)):
                    notified = await subscription.wait(until)
                    if waiter.granted or not notified:
                        break
                    # The held sessions may have changed since the request, so do not renew them.
                    again, orders = await self._database.read(leases.reconcile, node, request.held)
            finally:
                if self._waiting.get(node) is waiter:
                    del self._waiting[node]
        return await self._respond(node, orders, request.held, (*again, *waiter.granted))

    async def renew(self, node: str, renewal: protocol.Renewal) -> protocol.LeaseResponse:
        """Extend the lease; return all orders, but no work."""
        _, orders = await self._renew(node, renewal)
        return await self._respond(node, orders, renewal.held, ())

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> protocol.Commit:
        """Store a result. Raises `FencedError` for a lost lease, `Invalid` for a bad result.

        The blob of a result that is retried has no row; retention removes it.
        """
        digest = await asyncio.to_thread(compute_digest, trajectory)
        if await self._database.read(leases.find_lease, session, epoch, digest) is None:
            return protocol.Commit(protocol.CommitOutcome.ALREADY)
        end = await asyncio.to_thread(read_end, session, epoch, trajectory, digest)
        await self._blobs.put(end.blob, trajectory)
        outcome = await self._database.write(leases.commit, session, epoch, end)
        self._logs.hub.notify([session])
        return protocol.Commit(outcome)

    async def release(self, session: str, release: protocol.Release) -> None:
        """Return a session to the queue. Raises `FencedError` for a lost lease."""
        await self._database.write(leases.release, session, release)

    async def drain(self, node: str) -> None:
        """Lease no more sessions to a node. Raises `FencedError` for a lost node."""
        await self._database.write(nodes.drain, node)

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append to the log of a session; return its length. Raises `FencedError`."""
        await self._database.read(sessions.get_leased, session, epoch)
        return await self._logs.append(session, epoch, offset, chunk)

    # ------------------------------------------------------------------ one request
    async def _renew(self, node: str, request: protocol.Renewal) -> Orders:
        return await self._database.write_relaxed(
            leases.renew, node, request, lease_s=self._settings.lease_s
        )

    def _has_news(
        self, node: str, orders: protocol.LeaseResponse, request: protocol.LeaseRequest
    ) -> bool:
        if self._nodes_changed.poll():  # drop entries of lost nodes; orders are repeated once
            self._known.clear()
        known = self._known.get(node, protocol.LeaseResponse())
        return bool(
            set(orders.stop) - set(known.stop)
            or orders.control.generation > max(request.applied, known.control.generation)
            or orders.draining > known.draining
            or self._list_followed(request.held) - set(known.follow)
        )

    def _list_followed(self, held: Sequence[protocol.HeldSession]) -> set[str]:
        return {each.session for each in held}.intersection(self._logs.followed())

    async def _respond(
        self,
        node: str,
        orders: protocol.LeaseResponse,
        held: Sequence[protocol.HeldSession],
        granted: Sequence[Session],
    ) -> protocol.LeaseResponse:
        ids = {session.task for session in granted}
        bodies: dict[str, Task] = {}
        if ids:
            bodies = await self._database.read(lambda tx: {id_: tasks.body(tx, id_) for id_ in ids})
        known = replace(orders, follow=tuple(sorted(self._list_followed(held))))
        self._known[node] = known
        unique = {session.id: session for session in granted}
        work = tuple(protocol.Work(session, bodies[session.task]) for session in unique.values())
        return replace(known, work=work)

    # ------------------------------------------------------------------ granting
    async def _grant(self) -> None:
        waiters = dict(self._waiting)
        if not waiters:
            return
        capacities = {node: waiter.capacity for node, waiter in waiters.items()}
        granted = await self._database.write(leases.grant, capacities, self._settings)
        for node, work in granted.items():
            waiter = waiters[node]
            if self._waiting.get(node) is waiter:
                del self._waiting[node]
                waiter.granted = work
                waiter.subscription.notify()
            else:  # its request has ended; the next one shows that it did not receive them
                self._database.hub.notify([f"node:{node}"])
