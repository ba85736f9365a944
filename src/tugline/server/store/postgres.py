"""PostgreSQL driver: several servers share one database, which may restart under them.

A writing transaction first locks the counter of positions, so the writers of all servers take
turns: positions become visible in order, and no deadlock is possible. Group commit makes the turns
few. ``NOTIFY`` tells the other servers which topics a transaction notifies.
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
"""Key of the advisory lock under which tables are made."""
_SESSION = read_sql("postgres_session").encode()
_log = log.get("store")


class Postgres(Driver):
    """The database at `url`."""

    name, blob = "postgresql", "BYTEA"
    now = "EXTRACT(EPOCH FROM clock_timestamp())::float8"
    errors = (psycopg.Error,)
    mistakes = (psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.DataError)

    def __init__(self, url: str) -> None:
        self._url, self.place = url, _redact(url)
        self._own: set[int] = set()
        """Backends of this server's writers: their notifications are ignored."""

    def prepare(self) -> None:
        """Bring the tables up to date; servers that start at the same time take turns."""
        with closing(self.connect()) as connection:
            connection.begin_migration(_MIGRATING)
            connection.run("CREATE TABLE IF NOT EXISTS layout (steps INTEGER NOT NULL)")
            layout = connection.fetch_value("SELECT MAX(steps) FROM layout") or 0
            self.migrate(connection, layout)
            if layout < len(STEPS):
                connection.run("INSERT INTO layout VALUES (:steps)", steps=len(STEPS))
            connection.commit()

    def connect(self, *, reading: bool = False) -> PostgresConnection:
        """Open a connection, which notices within seconds that the other end is gone."""
        opened = PostgresConnection(_connect(self._url))
        if not reading:
            self._own.add(opened.process)
        return opened

    def advise(self, error: Exception) -> str:
        """What follows the text of an error."""
        if isinstance(error, psycopg.errors.DiskFull):
            return FULL
        return "; it is retried until it is back" if self.is_lost(error) else ""

    def is_lost(self, error: Exception) -> bool:
        """Whether the database is restarting or unreachable, or the transaction was in the way."""
        full = isinstance(error, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory)
        return not full and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)

    @contextmanager
    def listen(self, receive: Callable[[Iterable[str] | None], None]) -> Iterator[None]:
        """Pass on notifications of other servers."""
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
                    receive(None)  # whatever happened before
                    while not done.is_set():
                        for notification in connection.notifies(timeout=_POLL_S):
                            if notification.pid not in self._own:
                                receive([notification.payload])
            except self.errors as error:
                _log.warning("not listening to other servers", error=str(self.explain(error)))
                done.wait(_PAUSE_S)


class PostgresConnection(Connection):
    """A connection whose transactions write in turn."""

    matching = "matching_texts(:words, :tasks) AS texts (rowid) WHERE true"

    def __init__(self, db: psycopg.Connection[Row]) -> None:
        super().__init__(db)
        self.process = db.info.backend_pid

    def begin(self, *, durable: bool) -> None:
        """Wait for this server's turn to write."""
        settings = "" if durable else "SET LOCAL synchronous_commit = off; "
        self._db.execute(f"BEGIN; {settings}{_LOCK_POSITIONS}")

    def begin_migration(self, key: int) -> None:
        """Start a transaction under an advisory lock, before there are any tables."""
        self._db.execute("BEGIN")
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
        """Return to the savepoint, if the transaction is still there."""
        with suppress(psycopg.Error):  # the connection is lost: the first error says so
            self._db.execute("ROLLBACK TO op")

    @property
    def usable(self) -> bool:
        """Whether the transaction continues."""
        return self._db.info.transaction_status is TransactionStatus.INTRANS

    def translate(self, sql: str) -> Any:
        """``:name`` as psycopg writes it."""
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
    """Host and name, without user and password."""
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"
