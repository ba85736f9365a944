"""What a trainer, a script or a person can ask a rollout server; `sync` is the same without await.

Every call has a deadline (`deadline_s`, 60 unless told otherwise), until which whatever passes by
itself is tried again, and every stream goes on over a server that restarts. Nothing is submitted
twice: the ids of tasks are the caller's, so submitting again is how to be sure. A result is
delivered until its consumer has acknowledged it (I3).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tugline.client import streams
from tugline.client.discovery import find_server
from tugline.client.results import GroupResults, Result, Wanted, stream, unpack
from tugline.client.transport import Transport, quoted
from tugline.errors import ServerError, UsageError
from tugline.protocol import (
    Accepted,
    Ack,
    Barrier,
    Cancelled,
    Consumer,
    Control,
    Counts,
    Delivery,
    DeliveryState,
    Event,
    EventKind,
    NodeView,
    Page,
    Pause,
    PauseMode,
    ResultView,
    SessionView,
    TaskState,
    TaskView,
    Version,
)
from tugline.types import Status, Task, Trajectory

DEADLINE_S = 60.0
BATCH, BATCH_BYTES = 1000, 32 << 20
"""What one request submits at most."""
ACK_EVERY_S = 1.0
"""Results that are there already are acknowledged together, this often."""


class Client:
    """A rollout server; an async context manager.

    Without `server` it is the one of ``TUGLINE_SERVER``, else that of ``tugline up`` in `folder`.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        folder: Path | str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        found = find_server(server, token, folder)
        self._http = Transport(found.url, found.token, deadline_s=deadline_s)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        """Of the server."""
        return self._http.url

    # ---------------------------------------------------------------------- tasks and sessions
    async def submit(self, tasks: Task | Iterable[Task]) -> list[Accepted]:
        """Have tasks kept durably, in batches; each batch wholly or not at all.

        Raises `Invalid` or `Conflict`, whose `field` begins with the place of the task.
        """
        accepted: list[Accepted] = []
        for batch in _batches([tasks] if isinstance(tasks, Task) else tasks):
            try:
                accepted += await self._http.ask("POST", "/v1/tasks", list[Accepted], body=batch)
            except ServerError as error:
                raise _placed(error, len(accepted)) from error
        return accepted

    async def task(self, task: str) -> TaskView:
        """A task as it stands. Raises `Missing`."""
        return await self._http.ask("GET", f"/v1/tasks/{quoted(task)}", TaskView)

    async def task_body(self, task: str) -> Task:
        """A task as it was submitted. Raises `Missing`."""
        return await self._http.ask("GET", f"/v1/tasks/{quoted(task)}/body", Task)

    async def tasks(
        self, *, state: TaskState | None = None, tenant: str | None = None, tag: str | None = None
    ) -> AsyncIterator[TaskView]:
        """Tasks in the order of submission; `tag` is ``key=value``."""
        query = {"state": state, "tenant": tenant, "tag": tag}
        async for page in self._listed("/v1/tasks", query):
            for one in page.tasks:
                yield one

    async def session(self, session: str) -> SessionView:
        """A session as it stands. Raises `Missing`."""
        return await self._http.ask("GET", f"/v1/sessions/{quoted(session)}", SessionView)

    async def sessions(
        self, *, task: str | None = None, status: Status | None = None, node: str | None = None
    ) -> AsyncIterator[SessionView]:
        """Sessions in the order of submission."""
        query = {"task": task, "status": status, "node": node}
        async for page in self._listed("/v1/sessions", query):
            for one in page.sessions:
                yield one

    async def cancel(
        self, *, task: str | None = None, session: str | None = None, by: str = "a client"
    ) -> Cancelled:
        """End a task or a session: what waits at once, what runs as soon as its node hears of it.

        Raises `Missing`.
        """
        if (task is None) == (session is None):
            msg = "cancel either a task or a session"
            raise UsageError(msg)
        kind, name = ("tasks", task) if task is not None else ("sessions", session or "")
        path = f"/v1/{kind}/{quoted(name)}/cancel"
        return await self._http.ask("POST", path, Cancelled, query={"by": by})

    async def released(self, tasks: Iterable[str]) -> AsyncGenerator[TaskView, None]:
        """Each of these tasks once all its sessions are final, in that order."""
        names = dict.fromkeys(tasks)
        after = (await self.status()).position
        for name in list(names):
            if (view := await self.task(name)).state is TaskState.RELEASED:
                del names[name]
                yield view
        if not names:
            return
        alone = next(iter(names)) if len(names) == 1 else None
        async with aclosing(self.events(after=after, task=alone)) as happened:
            async for event in happened:
                if event.kind is EventKind.RELEASED and event.task in names:
                    del names[event.task]
                    yield await self.task(event.task)
                if not names:
                    return

    async def wait(self, tasks: str | Iterable[str]) -> list[TaskView]:
        """Until all of these tasks are released; bound it by ``asyncio.timeout`` if need be."""
        names = [tasks] if isinstance(tasks, str) else list(tasks)
        views = {view.id: view async for view in self.released(names)}
        return [views[name] for name in names]

    # ---------------------------------------------------------------------- results
    async def results(
        self,
        consumer: str | None = None,
        *,
        after: int | None = None,
        tasks: Sequence[str] = (),
        follow: bool = True,
        auto_ack: bool = False,
    ) -> AsyncGenerator[Result, None]:
        """Results with their trajectories, in order of commit, from where `consumer` is.

        With `auto_ack`, a result counts as safe when the body of the loop is done with it; else
        call `ack`. Without `follow` it ends when there is nothing more for now.
        """
        wanted = Wanted(consumer, after, tuple(tasks), groups=False, follow=follow)
        async with aclosing(self._read(wanted, auto_ack=auto_ack)) as items:
            async for item in items:
                if isinstance(item, Result):
                    yield item

    async def groups(
        self,
        consumer: str | None = None,
        *,
        after: int | None = None,
        tasks: Sequence[str] = (),
        follow: bool = True,
        auto_ack: bool = False,
    ) -> AsyncGenerator[GroupResults, None]:
        """Whole groups, in the order of their release; the rest as for `results`."""
        wanted = Wanted(consumer, after, tuple(tasks), groups=True, follow=follow)
        async with aclosing(self._read(wanted, auto_ack=auto_ack)) as items:
            async for item in items:
                if isinstance(item, GroupResults):
                    yield item

    async def ack(self, consumer: str, cursor: int) -> Consumer:
        """Everything up to `cursor` is safe with the consumer, and need not come again."""
        query = {"consumer": consumer}
        return await self._http.ask(
            "POST", "/v1/results/ack", Consumer, query=query, body=Ack(cursor)
        )

    async def consumers(self) -> list[Consumer]:
        """Who reads results, and how far."""
        return await self._http.ask("GET", "/v1/consumers", list[Consumer])

    async def result(self, session: str) -> ResultView:
        """The result of a session, without tokens. Raises `Missing`."""
        return await self._http.ask("GET", f"/v1/sessions/{quoted(session)}/result", ResultView)

    async def trajectory(self, session: str) -> Trajectory:
        """What a trainer learns from a session. Raises `Missing` for one that never ran."""
        return unpack(
            await self._http.ask("GET", f"/v1/sessions/{quoted(session)}/trajectory", bytes)
        )

    # ---------------------------------------------------------------------- looking
    def events(
        self, *, after: int | None = None, task: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """What happens, from a position or from now on, for as long as it is read."""
        return streams.events(self._http, after, task)

    def log(
        self, session: str, *, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """What the agent of a session printed, or the last `tail` bytes of it."""
        return streams.log(self._http, session, tail=tail, follow=follow)

    async def status(self) -> Counts:
        """The whole at a glance."""
        return await self._http.ask("GET", "/v1/status", Counts)

    async def list_events(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """Up to `limit` past events after a position."""
        query = {"after": after, "limit": limit}
        return await self._http.ask("GET", "/v1/events", list[Event], query=query)

    async def metrics(self) -> str:
        """All that the server counts, as Prometheus reads it."""
        return (await self._http.ask("GET", "/metrics", bytes)).decode()

    async def nodes(self) -> list[NodeView]:
        """Where sessions run."""
        return await self._http.ask("GET", "/v1/nodes", list[NodeView])

    async def drain(self, node: str) -> None:
        """Have a node finish what it runs, and go."""
        await self._http.ask("POST", f"/v1/nodes/{quoted(node)}/drain", type(None))

    async def deliveries(
        self, state: DeliveryState | None = None, *, after: int = 0, limit: int = 100
    ) -> list[Delivery]:
        """Callbacks on their way, delivered or given up."""
        query = {"state": state, "after": after, "limit": limit}
        return await self._http.ask("GET", "/v1/deliveries", list[Delivery], query=query)

    async def redeliver(self, delivery: int) -> Delivery:
        """Send a callback again. Raises `Missing`."""
        return await self._http.ask("POST", f"/v1/deliveries/{delivery}/retry", Delivery)

    # ---------------------------------------------------------------------- weights
    async def weights(self) -> Control:
        """The newest version, and whether model calls are held."""
        return await self._http.ask("GET", "/v1/weights", Control)

    async def announce(self, version: int) -> Barrier:
        """New weights are in the engines. `Barrier.missing` names nodes that have not heard it."""
        return await self._barrier("", Version(version))

    async def pause(self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 60.0) -> Barrier:
        """Hold model calls on all nodes; returns when they are held, or after `within_s`."""
        return await self._barrier("/pause", Pause(mode, within_s), wait_s=within_s)

    async def resume(self) -> Barrier:
        """Let model calls go on."""
        return await self._barrier("/resume")

    @contextlib.asynccontextmanager
    async def paused(
        self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 60.0
    ) -> AsyncIterator[Barrier]:
        """Model calls are held while the block lasts.

        Raises `ServerError` naming the nodes that did not answer in time; they go on then.
        """
        try:
            barrier = await self.pause(mode, within_s=within_s)
            if barrier.missing:
                msg = f"not paused within {within_s:g} s: {', '.join(barrier.missing)}"
                raise ServerError(msg)
            yield barrier
        finally:
            await self.resume()

    # ---------------------------------------------------------------------- inside
    async def _listed(self, path: str, query: dict[str, Any]) -> AsyncGenerator[Page, None]:
        after: str | None = None
        while True:
            page = await self._http.ask("GET", path, Page, query={**query, "after": after})
            yield page
            if (after := page.next) is None:
                return

    async def _barrier(
        self, path: str, body: msgspec.Struct | None = None, *, wait_s: float = 60.0
    ) -> Barrier:
        where = f"/v1/weights{path}"
        return await self._http.ask("POST", where, Barrier, body=body, wait_s=wait_s)

    async def _read(
        self, wanted: Wanted, *, auto_ack: bool
    ) -> AsyncGenerator[Result | GroupResults, None]:
        """Items; one counts as done when the next is asked for."""
        if auto_ack and wanted.consumer is None:
            msg = "auto_ack needs the name of a consumer"
            raise UsageError(msg)
        name, clock = wanted.consumer if auto_ack else None, asyncio.get_running_loop().time
        safe, acked = 0, clock()
        try:
            async with aclosing(stream(self._http, wanted)) as items:
                async for item in items:
                    if item is not None:
                        yield item
                        safe = item.cursor
                    if name and safe and (item is None or clock() - acked >= ACK_EVERY_S):
                        await self.ack(name, safe)
                        safe, acked = 0, clock()
        finally:
            if name and safe:
                with contextlib.suppress(ServerError, UsageError):  # they come again, that is all
                    await self.ack(name, safe)


def _batches(tasks: Iterable[Task]) -> Iterable[list[msgspec.Struct]]:
    batch: list[msgspec.Struct] = []
    size = 0
    for task in tasks:
        more = len(msgspec.json.encode(task))
        if batch and (len(batch) == BATCH or size + more > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(task)
        size += more
    if batch:
        yield batch


def _placed(error: ServerError, before: int) -> ServerError:
    """`error` with the place of the task among all, not in its batch."""
    number, dot, rest = error.field.partition(".")
    if not number.isdigit():
        return error
    field = f"{int(number) + before}{dot}{rest}"
    return type(error)(str(error), status=error.status, field=field)
