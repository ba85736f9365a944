"""Blocking client: `Client` on the event loop of a background thread.

For scripts, notebooks and trainers without an event loop. A `SyncClient` can be used from several
threads. Every method is derived from the same method of `Client`, with its signature and docstring.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tugline.client.api import DEADLINE_S, Client
from tugline.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


def _block(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    return call


def _iterate(
    method: Callable[Concatenate[Client, P], AsyncIterator[T]],
) -> Callable[Concatenate[SyncClient, P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._client, *args, **kwargs)
        try:
            while (item := self._run(_next(items))) is not None:
                yield item
        finally:
            self._close(items)

    return call


def _enter(
    method: Callable[Concatenate[Client, P], AbstractAsyncContextManager[T]],
) -> Callable[Concatenate[SyncClient, P], AbstractContextManager[T]]:
    @functools.wraps(method)
    @contextlib.contextmanager
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        block = method(self._client, *args, **kwargs)
        value = self._run(block.__aenter__())
        try:
            yield value
        finally:
            self._run(block.__aexit__(None, None, None))

    return call


class SyncClient:
    """Blocking client of a rollout server; a context manager. See `Client`."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        folder: Path | str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._client = Client(server, token, folder=folder, deadline_s=deadline_s)
        self.url = self._client.url
        """URL of the server."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="tugline-client", daemon=True)
        self._thread.start()
        self._run(self._client.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        loop = self._loop
        thread = self._thread
        if loop is None or thread is None:
            return
        self._run(loop.shutdown_asyncgens())
        self._run(self._client.__aexit__(*exc))
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    submit = _block(Client.submit)
    task = _block(Client.task)
    task_body = _block(Client.task_body)
    tasks = _iterate(Client.tasks)
    session = _block(Client.session)
    sessions = _iterate(Client.sessions)
    cancel = _block(Client.cancel)
    retry_task = _block(Client.retry_task)
    write_note = _block(Client.write_note)
    released = _iterate(Client.released)
    wait = _block(Client.wait)

    rejudge = _block(Client.rejudge)
    verdicts = _block(Client.verdicts)
    use_verdicts = _block(Client.use_verdicts)

    results = _iterate(Client.results)
    groups = _iterate(Client.groups)
    ack = _block(Client.ack)
    consumers = _block(Client.consumers)
    delete_consumer = _block(Client.delete_consumer)
    result = _block(Client.result)
    trajectory = _block(Client.trajectory)
    recording = _block(Client.recording)

    events = _iterate(Client.events)
    log = _iterate(Client.log)
    status = _block(Client.status)
    list_events = _block(Client.list_events)
    metrics = _block(Client.metrics)
    nodes = _block(Client.nodes)
    drain = _block(Client.drain)
    deliveries = _block(Client.deliveries)
    redeliver = _block(Client.redeliver)

    start_run = _block(Client.start_run)
    end_run = _block(Client.end_run)
    run_view = _block(Client.run_view)
    report_step = _block(Client.report_step)
    runs = _block(Client.runs)
    run_steps = _block(Client.run_steps)

    weights = _block(Client.weights)
    announce = _block(Client.announce)
    pause = _block(Client.pause)
    resume = _block(Client.resume)
    paused = _enter(Client.paused)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's loop. An interrupt of this thread cancels it."""
        if self._loop is None:
            work.close()
            raise UsageError(
                "this client is not open; enter it with `with SyncClient(...) as client`"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _close(self, items: AsyncIterator[Any]) -> None:
        """Close a stream; do not wait if the garbage collector calls this in the loop's thread."""
        if self._loop is None or not isinstance(items, AsyncGenerator):
            return
        if threading.current_thread() is self._thread:
            asyncio.run_coroutine_threadsafe(items.aclose(), self._loop)
            return
        with contextlib.suppress(RuntimeError):  # an interrupted step is closing it already
            self._run(items.aclose())


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)
