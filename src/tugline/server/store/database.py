"""Database access: durable writes with group commit, concurrent reads (I3).

An operation is a plain function of a transaction. One thread owns the write connection and commits
all queued operations as one transaction with one flush to disk (group commit). Each operation has a
savepoint, so an error affects only its caller. Callers get results after the commit. Reads have
their own connections and never wait for a write.

Operations may run again after a lost connection, so they check the current state before they change
it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from tugline import log
from tugline.errors import StoreError, UsageError
from tugline.plugins import import_extra
from tugline.server.store.base import Connection, Driver, Tx
from tugline.server.store.sqlite import Sqlite


class Subscription:
    """Pending notification of a subscriber; it is kept until `wait` or `poll` takes it."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Wake the subscriber."""
        self._notified.set()

    def poll(self) -> bool:
        """Whether there was a notification since the last `poll` or `wait`; do not wait."""
        notified = self._notified.is_set()
        self._notified.clear()
        return notified

    async def wait(self, until: float | None = None) -> bool:
        """Wait for a notification until the loop time `until`; return False if there was none."""
        try:
            async with asyncio.timeout_at(until):
                await self._notified.wait()
        except TimeoutError:
            return False
        self._notified.clear()
        return True


class Hub:
    """Topics and their subscribers, used in one event loop."""

    def __init__(self) -> None:
        self.topics: dict[str, set[Subscription]] = {}
        """Subscriptions by topic, without empty topics."""

    def add(self, *topics: str) -> Subscription:
        """Subscribe to `topics` permanently."""
        subscription = Subscription()
        for topic in topics:
            self.topics.setdefault(topic, set()).add(subscription)
        return subscription

    @contextmanager
    def subscribe(self, *topics: str) -> Iterator[Subscription]:
        """Subscribe to `topics` during the block."""
        subscription = self.add(*topics)
        try:
            yield subscription
        finally:
            for topic in topics:
                subscribers = self.topics[topic]
                subscribers.discard(subscription)
                if not subscribers:
                    del self.topics[topic]

    def notify(self, topics: Iterable[str] | None) -> None:
        """Wake the subscribers of `topics`; None: all, since notifications may have been missed."""
        for topic in tuple(self.topics) if topics is None else topics:
            for subscription in self.topics.get(topic, ()):
                subscription.notify()


def uptime() -> float:
    """Return seconds of a monotonic clock that includes time suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


_READERS = 2
_MAX_BATCH = 256
_MAX_QUEUED = 20_000
_PAUSE_S = 0.05
T = TypeVar("T")
P = ParamSpec("P")
Outcome = tuple[Any, BaseException | None]
"""Value and error of an operation."""
_log = log.get("store")


class _Job(NamedTuple):
    op: Callable[[Tx], Any]
    durable: bool
    future: asyncio.Future[Any]


class _Slot:
    """Connection that is opened on first use."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def open(self, driver: Driver, *, reading: bool = False) -> Connection:
        """Return the connection; open it if needed."""
        if self._connection is None:
            self._connection = driver.connect(reading=reading)
        return self._connection

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()


class Database:
    """Database with its threads; an async context manager. `hub` is notified after each commit.

    While the connection is lost, writes are retried for `retry_s`, reads and opening for a third of
    that, so that server and database can start at the same time.

    `clock` is the source of `Tx.now`. The default is the database's clock at opening, shared by all
    servers, plus the change of `uptime`: setting a machine's clock does not affect leases.
    """

    def __init__(
        self, driver: Driver, *, retry_s: float = 15.0, clock: Callable[[], float] | None = None
    ) -> None:
        self.hub = Hub()
        self._began = 0.0
        """Unix time at which `uptime` was 0."""
        self._opened = 0.0
        """`Tx.opened` of transactions."""
        self.clock = clock or (lambda: self._began + uptime())
        self.on_commit: Callable[[int, float], None] = lambda _ops, _seconds: None
        """Callback in the writer's thread after each commit: number of operations, seconds."""
        self._driver = driver
        self._retry_s = retry_s
        self.name = driver.name
        """``sqlite`` or ``postgresql``."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MAX_QUEUED)
        self._readers = [_Slot() for _ in range(_READERS)]
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="tugline-read")
        self._writer = threading.Thread(target=self._write_all, name="tugline-write", daemon=True)
        self._connection = _Slot()
        self._open = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._retry, self._driver.prepare, self._retry_s / 3)
        self._listening = self._driver.listen(self._receive)
        self._listening.__enter__()
        self._writer.start()
        self._open = True
        now = await self.read(Tx.fetch_value, f"SELECT {self._driver.now}")
        self._began = now - uptime()
        self._opened = self.clock()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._open = False
        await asyncio.to_thread(self._end)

    async def write(
        self, op: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``op(tx, ...)``; changes are on disk when this returns.

        Raises the errors of `op`, and `StoreError` if the database is unavailable.
        """
        return await self._submit(lambda tx: op(tx, *args, **kwargs), durable=True)

    async def write_relaxed(
        self, op: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like `write`, but a power cut may undo it."""
        return await self._submit(lambda tx: op(tx, *args, **kwargs), durable=False)

    async def read(
        self, op: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``op(tx, ...)`` on a single snapshot, without changes.

        Raises the same errors as `write`.
        """
        self._check_open()
        return await self._loop.run_in_executor(
            self._pool, self._read, lambda tx: op(tx, *args, **kwargs)
        )

    def check(self, op: Callable[[Tx], T]) -> T:
        """Check the database's pages and read; a server may be running. Raises `StoreError`."""
        try:
            with closing(self._driver.connect(reading=True)) as connection:
                connection.begin_reading()
                connection.check_pages()
                return op(connection)
        except self._driver.errors as error:
            raise self._driver.explain(error) from error

    async def poll(
        self,
        op: Callable[[Tx], T],
        topics: Sequence[str],
        wait_s: float,
        is_ready: Callable[[T], bool],
    ) -> T:
        """Read, again after notifications of `topics`, until the value is ready or after `wait_s`.

        Returns the last value.
        """
        until = asyncio.get_running_loop().time() + wait_s
        with self.hub.subscribe(*topics) as subscription:
            while True:
                value = await self.read(op)
                if is_ready(value) or wait_s <= 0 or not await subscription.wait(until):
                    return value

    async def _submit(self, op: Callable[[Tx], T], *, durable: bool) -> T:
        self._check_open()
        future: asyncio.Future[T] = self._loop.create_future()
        try:
            self._jobs.put_nowait(_Job(op, durable, future))
        except queue.Full:
            msg = f"store: {_MAX_QUEUED} operations are waiting for the disk; try again later"
            raise StoreError(msg) from None
        return await future

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("store: the server is being stopped")

    def _retry(self, attempt: Callable[[], T], seconds: float, slot: _Slot | None = None) -> T:
        """Retry for `seconds` while the connection (in `slot`, if given) is lost."""
        until = time.monotonic() + seconds
        pause = _PAUSE_S
        while True:
            try:
                return attempt()
            except self._driver.operation_errors:
                raise
            except self._driver.errors as error:
                if slot is not None:
                    slot.close()
                if not self._driver.is_lost(error) or time.monotonic() > until:
                    raise self._driver.explain(error) from error
                _log.warning("connection lost, trying again", error=str(error).strip())
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    # ------------------------------------------------------------------ in the readers' threads
    def _read(self, op: Callable[[Tx], T]) -> T:
        slot = self._readers.pop()  # one per thread of the pool
        try:
            return self._retry(partial(self._read_once, slot, op), self._retry_s / 3, slot)
        finally:
            self._readers.append(slot)

    def _read_once(self, slot: _Slot, op: Callable[[Tx], T]) -> T:
        connection = slot.open(self._driver, reading=True)
        connection.begin_reading()
        connection.now = self.clock()
        connection.opened = self._opened
        try:
            return op(connection)
        finally:
            connection.rollback()

    # ------------------------------------------------------------------ in the writer's thread
    def _write_all(self) -> None:
        running = True
        while running:
            batch = [self._jobs.get()]
            while len(batch) < _MAX_BATCH and not self._jobs.empty():
                batch.append(self._jobs.get_nowait())
            running = None not in batch
            jobs = [job for job in batch if job is not None]
            if jobs:
                self._commit(jobs)

    def _commit(self, jobs: list[_Job]) -> None:
        began = time.monotonic()
        topics: set[str] = set()
        try:
            once = partial(self._commit_once, jobs)
            outcomes, topics = self._retry(once, self._retry_s, self._connection)
        except Exception as error:  # noqa: BLE001 - the writer's thread must not end
            self._connection.close()
            outcomes = [(None, error)] * len(jobs)
        self.on_commit(len(jobs), time.monotonic() - began)
        self._loop.call_soon_threadsafe(self._answer, jobs, outcomes, topics)

    def _commit_once(self, jobs: list[_Job]) -> tuple[list[Outcome], set[str]]:
        connection = self._connection.open(self._driver)
        connection.topics = set()
        connection.begin(durable=any(job.durable for job in jobs))
        connection.now = self.clock()
        connection.opened = self._opened
        outcomes = [self._run_job(connection, job) for job in jobs]
        connection.commit()
        return outcomes, connection.topics

    def _run_job(self, connection: Connection, job: _Job) -> Outcome:
        if job.future.cancelled():
            return None, None
        try:
            with connection.savepoint():
                return job.op(connection), None
        except self._driver.operation_errors as error:
            return None, error
        except self._driver.errors as error:
            if not connection.usable:
                raise
            return None, self._driver.explain(error)
        except Exception as error:  # noqa: BLE001 - returned to the operation's caller
            return None, error

    def _end(self) -> None:
        self._jobs.put(None)
        self._writer.join()
        self._listening.__exit__(None, None, None)
        self._pool.shutdown()
        for slot in (self._connection, *self._readers):
            slot.close()
        self._driver.release()

    # ------------------------------------------------------------------ in the event loop
    def _answer(self, jobs: list[_Job], outcomes: list[Outcome], topics: set[str]) -> None:
        self.hub.notify(topics)
        for job, (value, error) in zip(jobs, outcomes, strict=True):
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(error)

    def _receive(self, topics: Iterable[str] | None) -> None:
        self._loop.call_soon_threadsafe(self.hub.notify, topics)


def open_database(url: str, **settings: Any) -> Database:
    """Return the database at ``sqlite:PATH`` or ``postgresql://...``; entering it opens it."""
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest:
        return Database(Sqlite(Path(rest)), **settings)
    if scheme in {"postgresql", "postgres"}:
        what = f"store {url.partition('@')[2] or url!r}"
        postgres = import_extra("tugline.server.store.postgres", "postgres", what)
        return Database(postgres.Postgres(url), **settings)
    raise UsageError(f"store {url!r} must be sqlite:PATH or postgresql://USER:PASSWORD@HOST/NAME")
