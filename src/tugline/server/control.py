"""The rollout server without HTTP: tasks in, work to nodes, results out.

Everything is in the database before it is acknowledged, so a server that is killed goes on where it
was (I3); this class keeps nothing that could not be lost. What waits (for work, results, events, a
log) sleeps until it is woken and has a deadline. Nodes in the same process call it directly: it is
the `Dispatcher` of `protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from tugline import log
from tugline.errors import FencedError, Invalid, Missing, StoreError
from tugline.protocol import (
    Accepted,
    Barrier,
    Cancelled,
    Commit,
    CommitOutcome,
    Consumer,
    Control,
    Counts,
    Delivery,
    DeliveryState,
    Event,
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    NodeView,
    Page,
    Pause,
    Release,
    Renewal,
    Results,
    ResultView,
    SessionView,
    TaskState,
    TaskView,
)
from tugline.server import validation
from tugline.server.blobs import Blobs
from tugline.server.dispatch import Dispatch
from tugline.server.housekeeping import Housekeeping
from tugline.server.logs import LogPart, Logs
from tugline.server.store import (
    consumers,
    events,
    groups,
    leases,
    nodes,
    outbox,
    overview,
    results,
    sessions,
    tasks,
    tenants,
)
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.timers import Timers
from tugline.server.webhooks import Deliveries
from tugline.server.weights import Weights
from tugline.types import Status, Task

LEASE_S = 30.0
KEEP_EVENTS_S = 30 * 86_400.0
T = TypeVar("T")
_log = log.get("server")


class ControlPlane:
    """One rollout server; an async context manager.

    `folder` is for files of its own, such as logs. `tenants` are weights, 1 for those that are not
    named. `check` refuses tasks that could not be run. `secret` signs callbacks, which go to
    `callback_hosts` only, if any are named.
    """

    def __init__(  # noqa: PLR0913 - its settings, named
        self,
        database: Database,
        blobs: Blobs,
        *,
        folder: Path,
        lease_s: float = LEASE_S,
        tenants: Mapping[str, float] = {},
        check: Callable[[Task], None] = lambda _task: None,
        secret: bytes = b"",
        callback_hosts: Collection[str] | None = None,
        keep_events_s: float = KEEP_EVENTS_S,
        keep_tasks_s: float = math.inf,
    ) -> None:
        self.database = database
        self._blobs, self._lease_s, self._tenants, self._check = blobs, lease_s, tenants, check
        hosts = None if callback_hosts is None else frozenset(callback_hosts)
        self._logs = Logs(folder / "logs")
        self._dispatch = Dispatch(database, lease_s=lease_s, followed=self._logs.followed)
        self._weights = Weights(database)
        self._timers = Timers(database, lease_s=lease_s)
        self._deliveries = Deliveries(database, secret, hosts=hosts)
        self._housekeeping = Housekeeping(
            database, blobs, keep_events_s=keep_events_s, keep_tasks_s=keep_tasks_s
        )
        self._tokens: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.database)
            await self.database.write(partial(tenants.weigh, weights=self._tenants))
            for part in (
                self._logs,
                self._timers,
                self._dispatch,
                self._deliveries,
                self._housekeeping,
            ):
                await stack.enter_async_context(part)
            self._gone = stack.enter_context(self.database.hub.listen("nodes"))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stack.aclose()

    # ------------------------------------------------------------------ tasks
    async def submit(self, batch: Sequence[Task]) -> list[Accepted]:
        """Keep these tasks, all or none; one that is there already is left as it is.

        Raises `Invalid` and `Conflict`, with a field such as ``3.limits.agent_s``.
        """
        packed = await validation.packed(batch, self._checked)
        return await self.database.write(partial(tasks.submit, batch=packed, now=time.time()))

    def _checked(self, task: Task) -> None:
        self._check(task)
        self._deliveries.check(task)

    async def task(self, task: str) -> TaskView:
        """A task as it stands. Raises `Missing`."""
        return await self.database.read(partial(tasks.view, task=task))

    async def task_body(self, task: str) -> Task:
        """A task as it was submitted. Raises `Missing`."""
        return await self.database.read(partial(tasks.body, task=task))

    async def tasks(
        self,
        *,
        state: TaskState | None = None,
        tenant: str | None = None,
        tag: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Tasks in order of submission; `tag` is ``key=value``."""
        page = partial(tasks.page, state=state, tenant=tenant, tag=tag, after=after, limit=limit)
        return await self.database.read(page)

    async def sessions(
        self,
        *,
        task: str | None = None,
        status: Status | None = None,
        node: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Sessions in order of submission."""
        page = partial(sessions.page, task=task, status=status, node=node, after=after, limit=limit)
        return await self.database.read(page)

    async def session(self, session: str) -> SessionView:
        """A session as it stands. Raises `Missing`."""
        return (await self.database.read(partial(sessions.get, session=session))).view()

    async def cancel(
        self, *, task: str | None = None, session: str | None = None, by: str
    ) -> Cancelled:
        """Cancel a task or a session. Raises `Missing`."""
        now = time.time()
        if task is not None:
            cancel = partial(groups.cancel_task, task=task, by=by, now=now)
        elif session is not None:
            cancel = partial(groups.cancel_session, session=session, by=by, now=now)
        else:
            msg = "a task or a session must be named"
            raise Invalid(msg)
        return await self.database.write(cancel)

    async def counts(self) -> Counts:
        """The whole at a glance."""
        return await self.database.read(overview.counts)

    # ------------------------------------------------------------------ results
    async def results(
        self,
        *,
        consumer: str | None = None,
        after: int | None = None,
        limit: int = 100,
        wait_s: float = 0.0,
        tasks: Sequence[str] | None = None,
        groups: bool = False,
    ) -> Results:
        """Results after a cursor, or after what the consumer acknowledged, or from the beginning.

        With `groups`, whole groups in the order of their release.
        """

        def look(tx: Tx) -> Results:
            start = after
            if start is None:
                start = consumers.acked(tx, consumer) if consumer is not None else 0
            return (results.groups if groups else results.page)(tx, start, limit, tasks)

        topics = [f"task:{task}" for task in tasks or ()] or ["releases" if groups else "results"]
        return await self._awaited(look, topics, wait_s, lambda found: bool(found.items))

    async def result(self, session: str) -> ResultView:
        """The result of a session, without its tokens. Raises `Missing`."""
        found = await self.database.read(partial(results.one, session=session))
        if found is None:
            raise _no_result(session)
        return found

    async def trajectory(self, session: str) -> bytes:
        """The result of a session, encoded and compressed. Raises `Missing`."""
        blob = await self.database.read(partial(results.blob_of, session=session))
        if blob is None:
            raise _no_result(session)
        if not blob:
            msg = f"session {session!r} never ran: it has no trajectory"
            raise Missing(msg)
        return await self._blobs.get(blob)

    async def ack(self, consumer: str, cursor: int) -> Consumer:
        """Note that everything up to `cursor` is safe with this consumer. Raises `Invalid`."""
        ack = partial(consumers.ack, name=consumer, cursor=cursor, now=time.time())
        return await self.database.write(ack)

    async def consumers(self) -> list[Consumer]:
        """Who reads results, and how far."""
        return await self.database.read(consumers.all)

    # ------------------------------------------------------------------ nodes
    async def register(self, hello: NodeRegistration) -> NodeRegistered:
        """Take a node in; another of the same name is given up. Raises `Invalid`."""
        validation.greet(hello)
        join = partial(leases.join, hello=hello, now=time.time(), lease_s=self._lease_s)
        return await self.database.write(join)

    async def lease(self, node: str, ask: LeaseRequest) -> LeaseResponse:
        """Wait for work, for orders or for `ask.wait_s`. Raises `FencedError` for a lost node."""
        return await self._dispatch.lease(node, ask)

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Keep the lease. Raises `FencedError` for a lost node, which must register again."""
        return await self._dispatch.renew(node, renewal)

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Keep a result, or try again what failed for no fault of the agent.

        Raises `FencedError` for a lost lease, `Invalid` for bytes that are no result of it.
        """
        end = await validation.ended(session, epoch, trajectory)
        await self._blobs.put(end.blob, trajectory)
        try:
            commit = partial(leases.commit, session=session, epoch=epoch, end=end, now=time.time())
            kept = await self.database.write(commit)
        except (FencedError, Missing):
            await self._forget(end.blob)
            raise
        if kept is CommitOutcome.REQUEUED:
            await self._forget(end.blob)
        self._logs.wake(session)
        return Commit(kept)

    async def release(self, session: str, back: Release) -> None:
        """Give a session back to the queue. Raises `FencedError` for a lost lease."""
        give = partial(leases.release, session=session, back=back, now=time.time())
        await self.database.write(give)

    async def drain(self, node: str) -> None:
        """Give this node nothing more. Raises `FencedError` for one that is gone."""
        await self.database.write(partial(nodes.drain, node=node))

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Add to the log of a session; returns its length, from which to go on."""
        entry = await self.database.read(partial(sessions.get, session=session))
        if entry.epoch != epoch:
            msg = f"session {session} is at epoch {entry.epoch}; that of epoch {epoch} is over"
            raise FencedError(msg)
        return await self._logs.append(session, epoch, offset, chunk)

    async def nodes(self) -> list[NodeView]:
        """Nodes that are here, and those that went lately."""
        return await self.database.read(nodes.all)

    async def node_of(self, token: str) -> str | None:
        """The node that this token was given to; None for an unknown one, or one that is gone."""
        if self._gone.take():
            self._tokens.clear()
        if token not in self._tokens:
            node = await self.database.read(partial(nodes.of_token, token=token))
            if node is None:
                return None
            self._tokens[token] = node
        return self._tokens[token]

    # ------------------------------------------------------------------ weights
    async def control(self) -> Control:
        """What all nodes are to put in place."""
        return await self.database.read(nodes.control)

    async def announce(self, version: int) -> Barrier:
        """New weights are in the engines. Raises `Invalid`."""
        return await self._weights.announce(version)

    async def pause(self, pause: Pause) -> Barrier:
        """Hold model calls on all nodes; waits until they do, at most `within_s`."""
        return await self._weights.pause(pause)

    async def resume(self) -> Barrier:
        """Let model calls through again on all nodes."""
        return await self._weights.resume()

    # ------------------------------------------------------------------ events, callbacks, logs
    async def events(
        self, *, after: int, limit: int = 100, wait_s: float = 0.0, task: str | None = None
    ) -> list[Event]:
        """What happened after a position, to one task or at all."""
        look = partial(events.page, after=after, limit=limit, task=task)
        return await self._awaited(look, [f"task:{task}" if task else "events"], wait_s, bool)

    async def deliveries(
        self, *, state: DeliveryState | None = None, after: int = 0, limit: int = 100
    ) -> list[Delivery]:
        """Callbacks by id."""
        return await self.database.read(partial(outbox.page, state=state, after=after, limit=limit))

    async def redeliver(self, delivery: int) -> Delivery:
        """Send a callback once more. Raises `Missing`."""
        again = partial(outbox.again, id=delivery, now=time.time())
        return await self.database.write(again)

    async def read_log(
        self, session: str, *, offset: int = 0, limit: int = 65_536, wait_s: float = 0.0
    ) -> LogPart:
        """Part of a session's log; waits up to `wait_s` for more of it. Raises `Missing`."""
        entry = await self.database.read(partial(sessions.get, session=session))
        over = not entry.leased and entry.status != Status.QUEUED
        if entry.node is not None and session not in self._logs.followed():
            self.database.hub.wake([f"node:{entry.node}"])
        return await self._logs.read(session, offset=offset, limit=limit, wait_s=wait_s, ended=over)

    # ------------------------------------------------------------------ below
    async def _awaited(
        self,
        look: Callable[[Tx], T],
        topics: Sequence[str],
        wait_s: float,
        enough: Callable[[T], bool],
    ) -> T:
        until = asyncio.get_running_loop().time() + wait_s
        with self.database.hub.listen(*topics) as bell:
            while True:
                seen = await self.database.read(look)
                if enough(seen) or wait_s <= 0 or not await bell.heard(until):
                    return seen

    async def _forget(self, blob: str) -> None:
        try:
            await self._blobs.delete(blob)
        except StoreError as error:  # what is left is swept at the next start
            _log.warning("blob left behind", blob=blob, error=str(error))


def _no_result(session: str) -> Missing:
    msg = f"session {session!r} has no result, or is unknown"
    return Missing(msg)
