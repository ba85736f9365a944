"""`Client` without await: the same client, on the event loop of a thread of its own.

For scripts, notebooks and trainers that have no event loop. One `SyncClient` may be used from
several threads. Its methods are made of those of `Client`, with their types and their words.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tugline.client.api import DEADLINE_S, Client
from tugline.errors import UsageError
from tugline.protocol import TaskView

P = ParamSpec("P")
T = TypeVar("T")


def _waited(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._do(method(self._client, *args, **kwargs))

    return call


def _each(
    method: Callable[Concatenate[Client, P], AsyncIterator[T]],
) -> Callable[Concatenate[SyncClient, P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._client, *args, **kwargs)
        try:
            while (item := self._do(_next(items))) is not None:
                yield item
        finally:
            self._leave(items)

    return call


def _entered(
    method: Callable[Concatenate[Client, P], AbstractAsyncContextManager[T]],
) -> Callable[Concatenate[SyncClient, P], AbstractContextManager[T]]:
    @functools.wraps(method)
    @contextlib.contextmanager
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        block = method(self._client, *args, **kwargs)
        value = self._do(block.__aenter__())
        try:
            yield value
        finally:
            self._do(block.__aexit__(None, None, None))

    return call


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
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="tugline-client", daemon=True)
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

    submit = _waited(Client.submit)
    task = _waited(Client.task)
    task_body = _waited(Client.task_body)
    tasks = _each(Client.tasks)
    session = _waited(Client.session)
    sessions = _each(Client.sessions)
    cancel = _waited(Client.cancel)
    released = _each(Client.released)

    results = _each(Client.results)
    groups = _each(Client.groups)
    ack = _waited(Client.ack)
    consumers = _waited(Client.consumers)
    result = _waited(Client.result)
    trajectory = _waited(Client.trajectory)

    events = _each(Client.events)
    log = _each(Client.log)
    status = _waited(Client.status)
    list_events = _waited(Client.list_events)
    metrics = _waited(Client.metrics)
    nodes = _waited(Client.nodes)
    drain = _waited(Client.drain)
    deliveries = _waited(Client.deliveries)
    redeliver = _waited(Client.redeliver)

    weights = _waited(Client.weights)
    announce = _waited(Client.announce)
    pause = _waited(Client.pause)
    resume = _waited(Client.resume)
    paused = _entered(Client.paused)

    def wait(self, tasks: str | Iterable[str], *, within_s: float | None = None) -> list[TaskView]:
        """Until all of these tasks are released. Raises `TimeoutError` after `within_s`."""
        return self._do(asyncio.wait_for(self._client.wait(tasks), within_s))

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

    def _leave(self, items: AsyncIterator[Any]) -> None:
        """Close a stream; without waiting where the garbage collector does so in our thread."""
        if self._loop is None or not isinstance(items, AsyncGenerator):
            return
        if threading.current_thread() is self._thread:
            asyncio.run_coroutine_threadsafe(items.aclose(), self._loop)
            return
        with contextlib.suppress(RuntimeError):  # a step that was interrupted is closing it
            self._do(items.aclose())


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)
