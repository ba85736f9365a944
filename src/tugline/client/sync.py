"""`Client` without await: the same client, on the event loop of a thread of its own.

For scripts, notebooks and trainers that have no event loop. One `SyncClient` may be used from
several threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tugline.client.api import DEADLINE_S, Client
from tugline.client.results import GroupResults, Result
from tugline.errors import UsageError
from tugline.protocol import (
    Accepted,
    Barrier,
    Cancelled,
    Consumer,
    Control,
    Counts,
    Delivery,
    DeliveryState,
    Event,
    NodeView,
    PauseMode,
    ResultView,
    SessionView,
    TaskState,
    TaskView,
)
from tugline.types import Status, Task, Trajectory

T = TypeVar("T")


class SyncClient:
    """A rollout server; a context manager. Each method is that of `Client`, and waits for it."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        folder: Path | str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._client = Client(server, token, folder=folder, deadline_s=deadline_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tugline-client", daemon=True
        )
        self._thread.start()
        self._do(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._do(loop.shutdown_asyncgens())
        self._do(self._client.__aexit__(kind, error, trace))
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    @property
    def url(self) -> str:
        """Of the server."""
        return self._client.url

    # ---------------------------------------------------------------------- tasks and sessions
    def submit(self, tasks: Task | Iterable[Task]) -> list[Accepted]:
        """As `Client.submit`."""
        return self._do(self._client.submit(tasks))

    def task(self, task: str) -> TaskView:
        """As `Client.task`."""
        return self._do(self._client.task(task))

    def task_body(self, task: str) -> Task:
        """As `Client.task_body`."""
        return self._do(self._client.task_body(task))

    def tasks(
        self, *, state: TaskState | None = None, tenant: str | None = None, tag: str | None = None
    ) -> Iterator[TaskView]:
        """As `Client.tasks`."""
        return self._each(self._client.tasks(state=state, tenant=tenant, tag=tag))

    def session(self, session: str) -> SessionView:
        """As `Client.session`."""
        return self._do(self._client.session(session))

    def sessions(
        self, *, task: str | None = None, status: Status | None = None, node: str | None = None
    ) -> Iterator[SessionView]:
        """As `Client.sessions`."""
        return self._each(self._client.sessions(task=task, status=status, node=node))

    def cancel(
        self, *, task: str | None = None, session: str | None = None, by: str = "a client"
    ) -> Cancelled:
        """As `Client.cancel`."""
        return self._do(self._client.cancel(task=task, session=session, by=by))

    def released(self, tasks: Iterable[str]) -> Iterator[TaskView]:
        """As `Client.released`."""
        return self._each(self._client.released(tasks))

    def wait(self, tasks: str | Iterable[str], *, within_s: float | None = None) -> list[TaskView]:
        """As `Client.wait`. Raises `TimeoutError` after `within_s`."""
        return self._do(asyncio.wait_for(self._client.wait(tasks), within_s))

    # ---------------------------------------------------------------------- results
    def results(
        self,
        consumer: str | None = None,
        *,
        after: int | None = None,
        tasks: Sequence[str] = (),
        follow: bool = True,
        auto_ack: bool = False,
    ) -> Iterator[Result]:
        """As `Client.results`."""
        return self._each(
            self._client.results(
                consumer, after=after, tasks=tasks, follow=follow, auto_ack=auto_ack
            )
        )

    def groups(
        self,
        consumer: str | None = None,
        *,
        after: int | None = None,
        tasks: Sequence[str] = (),
        follow: bool = True,
        auto_ack: bool = False,
    ) -> Iterator[GroupResults]:
        """As `Client.groups`."""
        return self._each(
            self._client.groups(
                consumer, after=after, tasks=tasks, follow=follow, auto_ack=auto_ack
            )
        )

    def ack(self, consumer: str, cursor: int) -> Consumer:
        """As `Client.ack`."""
        return self._do(self._client.ack(consumer, cursor))

    def consumers(self) -> list[Consumer]:
        """As `Client.consumers`."""
        return self._do(self._client.consumers())

    def result(self, session: str) -> ResultView:
        """As `Client.result`."""
        return self._do(self._client.result(session))

    def trajectory(self, session: str) -> Trajectory:
        """As `Client.trajectory`."""
        return self._do(self._client.trajectory(session))

    # ---------------------------------------------------------------------- looking
    def events(self, *, after: int | None = None, task: str | None = None) -> Iterator[Event]:
        """As `Client.events`."""
        return self._each(self._client.events(after=after, task=task))

    def log(
        self, session: str, *, tail: int | None = None, follow: bool = False
    ) -> Iterator[bytes]:
        """As `Client.log`."""
        return self._each(self._client.log(session, tail=tail, follow=follow))

    def status(self) -> Counts:
        """As `Client.status`."""
        return self._do(self._client.status())

    def happened(self, *, after: int = 0, limit: int = 1000) -> list[Event]:
        """As `Client.happened`."""
        return self._do(self._client.happened(after=after, limit=limit))

    def metrics(self) -> str:
        """As `Client.metrics`."""
        return self._do(self._client.metrics())

    def nodes(self) -> list[NodeView]:
        """As `Client.nodes`."""
        return self._do(self._client.nodes())

    def drain(self, node: str) -> None:
        """As `Client.drain`."""
        self._do(self._client.drain(node))

    def deliveries(
        self, state: DeliveryState | None = None, *, after: int = 0, limit: int = 100
    ) -> list[Delivery]:
        """As `Client.deliveries`."""
        return self._do(self._client.deliveries(state, after=after, limit=limit))

    def redeliver(self, delivery: int) -> Delivery:
        """As `Client.redeliver`."""
        return self._do(self._client.redeliver(delivery))

    # ---------------------------------------------------------------------- weights
    def weights(self) -> Control:
        """As `Client.weights`."""
        return self._do(self._client.weights())

    def announce(self, version: int) -> Barrier:
        """As `Client.announce`."""
        return self._do(self._client.announce(version))

    def pause(self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 60.0) -> Barrier:
        """As `Client.pause`."""
        return self._do(self._client.pause(mode, within_s=within_s))

    def resume(self) -> Barrier:
        """As `Client.resume`."""
        return self._do(self._client.resume())

    @contextlib.contextmanager
    def paused(
        self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 60.0
    ) -> Iterator[Barrier]:
        """As `Client.paused`."""
        block = self._client.paused(mode, within_s=within_s)
        barrier = self._do(block.__aenter__())
        try:
            yield barrier
        finally:
            self._do(block.__aexit__(None, None, None))

    # ---------------------------------------------------------------------- inside
    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the client's loop. An interrupt here ends the work there, too."""
        if self._loop is None:
            work.close()
            msg = "this client is not open: use `with SyncClient(...) as client`"
            raise UsageError(msg)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (item := self._do(_next(items))) is not None:
                yield item
        finally:
            if self._loop is not None and (close := getattr(items, "aclose", None)):
                self._do(close())


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)
