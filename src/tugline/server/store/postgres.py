"""PostgreSQL: several servers in front of one database, which may be restarted under them.

A writing transaction first locks the counter of positions, so writers of all servers take turns:
what has a position becomes visible in that order, and none waits for rows of another in a circle.
Group commit makes the turns few. ``NOTIFY`` tells the other servers what a transaction wakes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.pq import TransactionStatus

from tugline import log
from tugline.errors import StoreError, UsageError
from tugline.server.store.base import Dialect, Row
from tugline.server.store.schema import STEPS, statements

_DIALECT = Dialect("postgresql", blob="BYTEA", skip_locked="FOR UPDATE SKIP LOCKED")
_CHANNEL = "tugline"
_LONGEST = 7000
"""Bytes of a notification; PostgreSQL takes 8000."""
_LOOK_S = 0.25
_PAUSE_S = 0.5
_TURN = "SELECT at FROM positions WHERE name = 'events' FOR UPDATE"
_MIGRATING = 0x7467_6C6E
"""Key of the lock under which tables are made."""
_SETTINGS = (
    # A server that is stopped in the middle must not hold up the others.
    "SET idle_in_transaction_session_timeout = '10s'; SET statement_timeout = '60s';"
    # Every query walks an index; without statistics, as after the first 100,000 tasks, the
    # planner would read and sort whole tables instead.
    "SET enable_seqscan = off; SET enable_bitmapscan = off;"
    "SET enable_hashjoin = off; SET enable_mergejoin = off"
)
_log = log.get("store")


class Postgres:
    """The database at `url`."""

    name = "postgresql"
    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    mistakes: tuple[type[Exception], ...] = (
        psycopg.ProgrammingError,
        psycopg.IntegrityError,
        psycopg.DataError,
    )

    def __init__(self, url: str) -> None:
        self._url = url
        self._own: set[int] = set()
        """Processes that write for this server: their notifications are no news."""

    def prepare(self) -> None:
        """Bring the tables up to date; servers that start at the same time take turns."""
        try:
            connection = self.connect()
            try:
                self._migrate(connection)
            finally:
                connection.close()
        except self.errors as error:
            raise self.explain(error) from error

    def connect(self, *, reading: bool = False) -> PostgresConnection:
        """One more connection, which notices within seconds that the other end is gone."""
        opened = PostgresConnection(_opened(self._url))
        if not reading:
            self._own.add(opened.process)
        return opened

    def explain(self, error: Exception) -> StoreError:
        """Say what to do about it."""
        advice = ""
        if isinstance(error, psycopg.errors.DiskFull):
            advice = "; free some space, nothing that was acknowledged is lost"
        elif self.lost(error):
            advice = "; it is tried again when it is back"
        text = " ".join(str(error).split())
        return StoreError(f"store {_place(self._url)}: {text}{advice}")

    def lost(self, error: Exception) -> bool:
        """Whether it is restarting or unreachable, or this transaction was in another's way."""
        full = isinstance(error, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory)
        return not full and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)

    @contextmanager
    def listen(self, hear: Callable[[Iterable[str] | None], None]) -> Iterator[None]:
        """Pass on what other servers wake."""
        done = threading.Event()
        thread = threading.Thread(
            target=self._listen, args=(hear, done), name="tugline-listen", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def release(self) -> None:
        """Others have been let in all the time."""

    def _listen(self, hear: Callable[[Iterable[str] | None], None], done: threading.Event) -> None:
        while not done.is_set():
            try:
                with _opened(self._url) as connection:
                    connection.execute(f"LISTEN {_CHANNEL}")
                    hear(None)  # whatever happened before
                    while not done.is_set():
                        for one in connection.notifies(timeout=_LOOK_S):
                            if one.pid not in self._own:
                                hear(one.payload.split(","))
            except self.errors as error:
                _log.warning("not listening to other servers", error=str(self.explain(error)))
                done.wait(_PAUSE_S)

    def _migrate(self, connection: PostgresConnection) -> None:
        tx = connection.begin_alone(_MIGRATING)
        tx.run("CREATE TABLE IF NOT EXISTS layout (steps INTEGER NOT NULL)")
        layout = (tx.one("SELECT MAX(steps) FROM layout") or (None,))[0] or 0
        if layout > len(STEPS):
            msg = f"store {_place(self._url)} has layout {layout}, this version reads {len(STEPS)}"
            raise UsageError(msg)
        for step in range(layout, len(STEPS)):
            for statement in statements(step, _DIALECT):
                tx.run(statement)
            tx.run("INSERT INTO layout VALUES (:steps)", steps=step + 1)
        connection.commit()


class PostgresConnection:
    """A connection and its open transaction in one."""

    dialect = _DIALECT

    def __init__(self, db: psycopg.Connection[Row]) -> None:
        self._db = db
        self.process = db.info.backend_pid
        self.topics: set[str] = set()

    # ------------------------------------------------------------------ the connection
    def begin(self, *, durable: bool) -> PostgresConnection:
        """Wait for this server's turn to write."""
        self.topics = set()
        waits = "" if durable else "SET LOCAL synchronous_commit = off; "
        self._db.execute(f"BEGIN; {waits}{_TURN}")
        return self

    def begin_alone(self, key: int) -> PostgresConnection:
        """A transaction under a lock of its own, before there are any tables."""
        self._db.execute("BEGIN")
        self._db.execute("SELECT pg_advisory_xact_lock(%s)", (key,))
        return self

    def begin_reading(self) -> PostgresConnection:
        """The first SELECT fixes what is seen."""
        self._db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return self

    def commit(self) -> None:
        """Write it down, and tell the other servers."""
        for payload in _payloads(self.topics):
            self._db.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, payload))
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Forget it."""
        self._db.execute("ROLLBACK")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """All or nothing of what is done within."""
        self._db.execute("SAVEPOINT op")
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error):  # the connection is lost: the first error says it
                self._db.execute("ROLLBACK TO op")
            raise
        self._db.execute("RELEASE op")

    @property
    def usable(self) -> bool:
        """Whether the transaction goes on."""
        return self._db.info.transaction_status is TransactionStatus.INTRANS

    def close(self) -> None:
        """What was not committed is forgotten."""
        self._db.close()

    # ------------------------------------------------------------------ the transaction
    def all(self, sql: str, **values: object) -> list[Row]:
        """All rows."""
        return self._db.execute(_query(sql), values).fetchall()

    def one(self, sql: str, **values: object) -> Row | None:
        """The first row, or None."""
        return self._db.execute(_query(sql), values).fetchone()

    def run(self, sql: str, **values: object) -> int:
        """How many rows it changed."""
        return self._db.execute(_query(sql), values).rowcount

    def many(self, sql: str, rows: Iterable[Mapping[str, object]]) -> None:
        """The same statement for each of `rows`, sent without waiting for each answer."""
        with self._db.cursor() as cursor:
            cursor.executemany(_query(sql), list(rows))

    def wake(self, *topics: str) -> None:
        """Noted; told with the commit."""
        self.topics.update(topics)


def _opened(url: str) -> psycopg.Connection[Row]:
    connection: psycopg.Connection[Row] = psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=5,
        keepalives_idle=5,
        keepalives_interval=5,
        keepalives_count=2,
        tcp_user_timeout=15_000,
        application_name="tugline",
    )
    connection.execute(_SETTINGS)
    return connection


@lru_cache(maxsize=256)
def _query(sql: str) -> Any:
    """``:name`` as psycopg writes it."""
    return re.sub(r"(?<![:\w]):([a-z]\w*)", r"%(\1)s", sql)


def _payloads(topics: Iterable[str]) -> Iterator[str]:
    """Topics joined by commas, in pieces that a notification can carry."""
    piece = ""
    for topic in sorted(topics):
        if len(piece) + len(topic) >= _LONGEST:
            yield piece
            piece = ""
        piece = f"{piece},{topic}" if piece else topic
    if piece:
        yield piece


def _place(url: str) -> str:
    """Host and name, without user and password."""
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"
