"""The database as the control plane uses it: operations in, durable results out (I3).

An operation is a plain function over a transaction. One thread owns the writing connection and
takes whatever has queued up as one transaction with one flush to disk (group commit); within it
each operation has a savepoint, so that one's error is its caller's alone. A caller gets its answer
after the commit, never before. Reads have connections of their own and never wait for a write.

Operations may be run again after a lost connection and must stand that: each looks at what is
there before it changes it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from tugline import log
from tugline.errors import StoreError, UsageError
from tugline.server.hub import Hub
from tugline.server.store.base import Connection, Store, Tx
from tugline.server.store.sqlite import Sqlite

READERS = 2
_BATCH = 256
_WAITING = 20_000
RETRY_S = 15.0
"""How long a write tries to get a lost connection back before it fails."""
READ_RETRY_S = 5.0
_PAUSE_S = 0.05
T = TypeVar("T")
_log = log.get("store")


class _Job(NamedTuple):
    op: Callable[[Tx], Any]
    durable: bool
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class Database:
    """One store with its threads; an async context manager. `hub` rings after each commit."""

    def __init__(self, store: Store) -> None:
        self.hub = Hub()
        self.on_batch: Callable[[int, float], None] = lambda _ops, _seconds: None
        """Told of each commit, in the writer's thread: operations and seconds."""
        self._store = store
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_WAITING)
        self._readers: queue.LifoQueue[Connection | None] = queue.LifoQueue()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="tugline-read")
        self._writer = threading.Thread(target=self._write_all, name="tugline-write", daemon=True)
        self._connection: Connection | None = None
        self._open = False

    @property
    def name(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._store.name

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._store.prepare)
        for _ in range(READERS):
            self._readers.put(None)
        self._listening = self._store.listen(self._overheard)
        self._listening.__enter__()
        self._writer.start()
        self._open = True
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._open = False
        await asyncio.to_thread(self._end)

    async def write(self, op: Callable[[Tx], T], *, durable: bool = True) -> T:
        """Run `op`; on the disk when this returns, unless `durable` is False.

        Raises what `op` raises, and `StoreError` when the database cannot be used.
        """
        self._check_open()
        future: asyncio.Future[T] = self._loop.create_future()
        try:
            self._jobs.put_nowait(_Job(op, durable, future))
        except queue.Full:
            msg = f"store: {_WAITING} operations are waiting for the disk already; try again later"
            raise StoreError(msg) from None
        return await future

    async def read(self, op: Callable[[Tx], T]) -> T:
        """Run `op`, which sees a single state and changes nothing. Raises as `write` does."""
        self._check_open()
        return await self._loop.run_in_executor(self._pool, self._read, op)

    def _check_open(self) -> None:
        if not self._open:
            msg = "store: the server is being stopped"
            raise StoreError(msg)

    # ------------------------------------------------------------------ in the readers' threads
    def _read(self, op: Callable[[Tx], T]) -> T:
        connection = self._readers.get()
        until = time.monotonic() + READ_RETRY_S
        try:
            while True:
                try:
                    connection = connection or self._store.connect(reading=True)
                    return _seen(connection, op)
                except self._store.mistakes:
                    raise
                except self._store.errors as error:
                    _close(connection)
                    connection = None
                    if not self._store.lost(error) or time.monotonic() > until:
                        raise self._store.explain(error) from error
                    time.sleep(_PAUSE_S)
        finally:
            self._readers.put(connection)

    # ------------------------------------------------------------------ in the writer's thread
    def _write_all(self) -> None:
        running = True
        while running:
            batch = [self._jobs.get()]
            while len(batch) < _BATCH and not self._jobs.empty():
                batch.append(self._jobs.get_nowait())
            running = None not in batch
            jobs = [job for job in batch if job is not None]
            if jobs:
                self._settle(jobs)

    def _settle(self, jobs: list[_Job]) -> None:
        began = time.monotonic()
        topics: set[str] = set()
        try:
            outcomes, topics = self._persist(jobs, began + RETRY_S)
        except Exception as error:  # noqa: BLE001 - this thread must go on, whatever it was
            _close(self._connection)
            self._connection = None
            outcomes = [_Outcome(error=error)] * len(jobs)
        self.on_batch(len(jobs), time.monotonic() - began)
        self._loop.call_soon_threadsafe(self._answer, jobs, outcomes, topics)

    def _persist(self, jobs: list[_Job], until: float) -> tuple[list[_Outcome], set[str]]:
        """One transaction, again on a new connection if the old one is lost."""
        pause = _PAUSE_S
        while True:
            try:
                return self._once(jobs)
            except self._store.errors as error:
                _close(self._connection)
                self._connection = None
                if not self._store.lost(error) or time.monotonic() > until:
                    raise self._store.explain(error) from error
                _log.warning("connection lost, trying again", error=str(error).strip())
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _once(self, jobs: list[_Job]) -> tuple[list[_Outcome], set[str]]:
        connection = self._connection = self._connection or self._store.connect()
        tx = connection.begin(durable=any(job.durable for job in jobs))
        outcomes = [self._one(connection, tx, job) for job in jobs]
        connection.commit()
        return outcomes, connection.topics

    def _one(self, connection: Connection, tx: Tx, job: _Job) -> _Outcome:
        if job.future.cancelled():
            return _Outcome()
        try:
            with connection.savepoint():
                return _Outcome(job.op(tx))
        except self._store.mistakes as error:
            return _Outcome(error=error)
        except self._store.errors as error:
            if not connection.usable:
                raise
            return _Outcome(error=self._store.explain(error))
        except Exception as error:  # noqa: BLE001 - an operation's error is its caller's alone
            return _Outcome(error=error)

    def _end(self) -> None:
        self._jobs.put(None)
        self._writer.join()
        self._listening.__exit__(None, None, None)
        self._pool.shutdown()
        _close(self._connection)
        while not self._readers.empty():
            _close(self._readers.get())
        self._store.release()

    # ------------------------------------------------------------------ back in the loop
    def _answer(self, jobs: list[_Job], outcomes: list[_Outcome], topics: set[str]) -> None:
        self.hub.wake(topics)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.future.done():
                continue
            if outcome.error is None:
                job.future.set_result(outcome.value)
            else:
                job.future.set_exception(outcome.error)

    def _overheard(self, topics: Iterable[str] | None) -> None:
        if topics is None:
            self._loop.call_soon_threadsafe(self.hub.wake_all)
        else:
            self._loop.call_soon_threadsafe(self.hub.wake, topics)


def _seen(connection: Connection, op: Callable[[Tx], T]) -> T:
    tx = connection.begin_reading()
    try:
        return op(tx)
    finally:
        connection.rollback()


def _close(connection: Connection | None) -> None:
    if connection is not None:
        connection.close()


def open_database(url: str) -> Database:
    """The database at ``sqlite:PATH`` or ``postgresql://...``; opened by entering it."""
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest:
        return Database(Sqlite(Path(rest)))
    if scheme in {"postgresql", "postgres"}:
        try:
            from tugline.server.store.postgres import Postgres  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            msg = f"store {url.partition('@')[2] or url!r} needs: pip install 'tugline[postgres]'"
            raise UsageError(msg) from error
        return Database(Postgres(url))
    msg = f"store {url!r} must be sqlite:PATH or postgresql://USER:PASSWORD@HOST/NAME"
    raise UsageError(msg)
