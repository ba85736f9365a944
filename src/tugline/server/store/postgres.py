"""PostgreSQL driver: several servers share a database, which may restart while they run.

A write transaction first locks the counter of positions, so the writers of all servers take turns:
positions become visible in order, and deadlocks are impossible. Group commit keeps the number of
turns low. ``NOTIFY`` sends the topics of a transaction to the other servers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.pq import TransactionStatus

from tugline import log
from tugline.server.store.base import FULL, STEPS, Connection, Driver, Row, read_sql

_CHANNEL = "tugline"
_POLL_S = 0.25
_PAUSE_S = 0.5
_LOCK_POSITIONS = "SELECT at FROM positions WHERE name = 'events' FOR UPDATE"
_MIGRATING = 0x7467_6C6E
"""Key of the advisory lock for migrations."""
_SESSION = read_sql("postgres_session").encode()
_MIGRATION = read_sql("postgres_migration").encode()
_log = log.get("store")


class Postgres(Driver):
    """Driver of the database at `url`."""

    name = "postgresql"
    blob = "BYTEA"
    now = "EXTRACT(EPOCH FROM clock_timestamp())::float8"
    errors = (psycopg.Error,)
    operation_errors = (psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.DataError)

    def __init__(self, url: str) -> None:
        self._url = url
        self.location = _redact(url)
        self._own: set[int] = set()
        """Process ids of this server's write connections, whose notifications are ignored."""

    def prepare(self) -> None:
        """Migrate the tables; servers that start at the same time take turns."""
        with closing(self.connect()) as connection:
            connection.begin_migration(_MIGRATING)
            connection.run("CREATE TABLE IF NOT EXISTS layout (steps INTEGER NOT NULL)")
            layout = connection.fetch_value("SELECT MAX(steps) FROM layout") or 0
            self.migrate(connection, layout)
            if layout < len(STEPS):
                connection.run("INSERT INTO layout VALUES (:steps)", steps=len(STEPS))
            connection.commit()

    def connect(self, *, reading: bool = False) -> PostgresConnection:
        """Open a connection that detects a lost server within seconds."""
        connection = PostgresConnection(_connect(self._url))
        if not reading:
            self._own.add(connection.process)
        return connection

    def advise(self, error: Exception) -> str:
        """Return the advice after the text of an error."""
        if isinstance(error, psycopg.errors.DiskFull):
            return FULL
        return "; the connection is retried" if self.is_lost(error) else ""

    def is_lost(self, error: Exception) -> bool:
        """Whether the database is restarting or unreachable, or has aborted the transaction."""
        full = isinstance(error, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory)
        return not full and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)

    @contextmanager
    def listen(self, receive: Callable[[Iterable[str] | None], None]) -> Iterator[None]:
        """Receive notifications of other servers during the block."""
        done = threading.Event()
        thread = threading.Thread(
            target=self._listen, args=(receive, done), name="tugline-listen", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _listen(
        self, receive: Callable[[Iterable[str] | None], None], done: threading.Event
    ) -> None:
        while not done.is_set():
            try:
                with _connect(self._url) as connection:
                    connection.execute(f"LISTEN {_CHANNEL}")
                    receive(None)  # earlier notifications may be missed
                    while not done.is_set():
                        for notification in connection.notifies(timeout=_POLL_S):
                            if notification.pid not in self._own:
                                receive([notification.payload])
            except self.errors as error:
                _log.warning("not listening to other servers", error=str(self.explain(error)))
                done.wait(_PAUSE_S)


class PostgresConnection(Connection):
    """Connection to PostgreSQL."""

    matching = "matching_texts(:words, :tasks) AS texts (rowid) WHERE true"

    def __init__(self, db: psycopg.Connection[Row]) -> None:
        super().__init__(db)
        self.process = db.info.backend_pid

    def begin(self, *, durable: bool) -> None:
        """Start a write transaction; wait until other servers have ended theirs."""
        settings = "" if durable else "SET LOCAL synchronous_commit = off; "
        self._db.execute(f"BEGIN; {settings}{_LOCK_POSITIONS}")

    def begin_migration(self, key: int) -> None:
        """Start a transaction under an advisory lock; it needs no tables.

        It may read and write whole tables: its statements have no time limit and the settings of
        the database's own planner.
        """
        self._db.execute("BEGIN")
        self._db.execute(_MIGRATION)
        self._db.execute("SELECT pg_advisory_xact_lock(%s)", (key,))

    def begin_reading(self) -> None:
        """Start a read transaction; its first SELECT takes the snapshot."""
        self._db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def commit(self) -> None:
        """Commit, and notify the other servers."""
        if self.topics:
            notify = "SELECT pg_notify(%s, topic) FROM unnest(%s::text[]) AS topic"
            self._db.execute(notify, (_CHANNEL, list(self.topics)))
        super().commit()

    def undo(self) -> None:
        """Roll back to the savepoint, if the transaction is still open."""
        with suppress(psycopg.Error):  # the connection is lost: the first error is raised
            self._db.execute("ROLLBACK TO op")

    @property
    def usable(self) -> bool:
        """Whether the transaction is open."""
        return self._db.info.transaction_status is TransactionStatus.INTRANS

    def translate(self, sql: str) -> Any:
        """Convert ``:name`` to the parameter syntax of psycopg."""
        return _translate(sql)


def _connect(url: str) -> psycopg.Connection[Row]:
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
    connection.execute(_SESSION)
    return connection


@lru_cache(maxsize=256)
def _translate(sql: str) -> str:
    return re.sub(r"(?<![:\w]):([a-z]\w*)", r"%(\1)s", sql)


def _redact(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"
