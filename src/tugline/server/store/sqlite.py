"""SQLite in one file: write-ahead log, flushed at every commit, one server at a time.

A lock beside the file keeps a second server out, for SQLite itself would let it in and each would
believe that the nodes are its own. Readers see the last commit and never wait for the writer.
"""

from __future__ import annotations

import fcntl
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tugline.errors import StoreError, UsageError
from tugline.server.store.base import Dialect, Row
from tugline.server.store.schema import STEPS, statements

_DIALECT = Dialect("sqlite", blob="BLOB", skip_locked="")


class Sqlite:
    """The database in the file at `path`, which is made if it is missing."""

    name = "sqlite"
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError)
    mistakes: tuple[type[Exception], ...] = (
        sqlite3.ProgrammingError,
        sqlite3.IntegrityError,
        sqlite3.DataError,
    )

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        """Lock the file for this process and bring its tables up to date."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._path.with_name(self._path.name + ".lock").open("w")
            self._possess()
            try:
                self._migrate()
            except BaseException:
                self.release()
                raise
        except self.errors as error:
            raise self.explain(error) from error

    def connect(self, *, reading: bool = False) -> SqliteConnection:
        """Open the file once more."""
        return SqliteConnection(self._path, reading=reading)

    def explain(self, error: Exception) -> StoreError:
        """Say what to do about it."""
        advice = ""
        if "full" in str(error) or "No space" in str(error):
            advice = "; free some space, nothing that was acknowledged is lost"
        elif "locked" in str(error):
            advice = "; another program is using the file"
        return StoreError(f"store {self._path}: {error}{advice}")

    def lost(self, error: Exception) -> bool:
        """Never: a file is there or it is not."""
        return False

    def listen(self, hear: Callable[[Iterable[str] | None], None]) -> nullcontext[None]:
        """Nobody else writes."""
        return nullcontext()

    def release(self) -> None:
        """Let another server have the file."""
        self._lock.close()

    def _possess(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            msg = f"store {self._path} is used by another server; stop it, or give this one another"
            raise UsageError(msg) from None

    def _migrate(self) -> None:
        connection = self.connect()
        try:
            tx = connection.begin(durable=True)
            layout = (tx.one("PRAGMA user_version") or (0,))[0]
            if layout > len(STEPS):
                msg = f"store {self._path} has layout {layout}, this version reads {len(STEPS)}"
                raise UsageError(msg)
            for step in range(layout, len(STEPS)):
                for statement in statements(step, _DIALECT):
                    tx.run(statement)
            tx.run(f"PRAGMA user_version = {len(STEPS)}")
            connection.commit()
        finally:
            connection.close()


class SqliteConnection:
    """A connection and its open transaction in one."""

    dialect = _DIALECT

    def __init__(self, path: Path, *, reading: bool) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA busy_timeout = 5000")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute("PRAGMA query_only = ON" if reading else "PRAGMA journal_mode = WAL")
        self.topics: set[str] = set()

    # ------------------------------------------------------------------ the connection
    def begin(self, *, durable: bool) -> SqliteConnection:
        """Take the right to write."""
        self.topics = set()
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        return self

    def begin_reading(self) -> SqliteConnection:
        """The first SELECT fixes what is seen."""
        self._db.execute("BEGIN")
        return self

    def commit(self) -> None:
        """Write it down."""
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Forget it."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """All or nothing of what is done within."""
        self._db.execute("SAVEPOINT op")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO op")
                self._db.execute("RELEASE op")
            raise
        self._db.execute("RELEASE op")

    @property
    def usable(self) -> bool:
        """SQLite ends the whole transaction itself when the disk is full."""
        return self._db.in_transaction

    def close(self) -> None:
        """What was not committed is forgotten."""
        self._db.close()

    # ------------------------------------------------------------------ the transaction
    def all(self, sql: str, **values: object) -> list[Row]:
        """All rows."""
        return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, **values: object) -> Row | None:
        """The first row, or None."""
        rows = self._db.execute(sql, values).fetchall()
        return rows[0] if rows else None

    def run(self, sql: str, **values: object) -> int:
        """How many rows it changed."""
        return self._db.execute(sql, values).rowcount

    def many(self, sql: str, rows: Iterable[Mapping[str, object]]) -> None:
        """The same statement for each of `rows`."""
        self._db.executemany(sql, rows)

    def wake(self, *topics: str) -> None:
        """Noted; the database rings after the commit."""
        self.topics.update(topics)
