"""SQLite driver: write-ahead log, flushed at every durable commit, one server at a time.

An flock on the database file prevents a second server, which SQLite would admit, although both
would manage the same nodes. SQLite's own locks are independent of it (fcntl). Readers see the last
commit and never wait for the writer.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from tugline.errors import UsageError
from tugline.server.store.base import FULL, STEPS, Connection, Driver


class Sqlite(Driver):
    """Driver of the database file at `path`; a missing file is created for this user only."""

    name = "sqlite"
    blob = "BLOB"
    now = "(julianday('now') - 2440587.5) * 86400.0"
    errors = (sqlite3.Error, OSError)
    operation_errors = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.DataError)

    def __init__(self, path: Path) -> None:
        self._path = path
        self.location = str(path)

    def prepare(self) -> None:
        """Lock the file for this process and migrate its tables."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(0o600)  # SQLite gives its other files the same mode
        self._lock = os.open(self._path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            msg = (
                f"store {self._path} is in use by another server; stop that server, or use "
                "another store"
            )
            raise UsageError(msg) from None
        try:
            with closing(self.connect()) as connection:
                connection.begin(durable=True)
                connection.check_pages()
                layout = connection.fetch_value("PRAGMA user_version")
                self.migrate(connection, layout)
                connection.run(f"PRAGMA user_version = {len(STEPS)}")
                connection.commit()
        except BaseException:
            self.release()
            raise

    def connect(self, *, reading: bool = False) -> SqliteConnection:
        """Open the file."""
        return SqliteConnection(self._path, reading=reading)

    def advise(self, error: Exception) -> str:
        """Return the advice after the text of an error."""
        if "full" in str(error) or "No space" in str(error):
            return FULL
        return "; another program has locked the file" if "locked" in str(error) else ""

    def release(self) -> None:
        """Unlock the file."""
        os.close(self._lock)


class SqliteConnection(Connection):
    """Connection to the file."""

    matching = "texts WHERE texts MATCH :words"

    def __init__(self, path: Path, *, reading: bool) -> None:
        where = f"{path.absolute().as_uri()}?mode=rw"  # does not create the file
        db = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
        super().__init__(db)
        self._db.execute("PRAGMA busy_timeout = 5000")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute("PRAGMA query_only = ON" if reading else "PRAGMA journal_mode = WAL")

    def check_pages(self) -> None:
        """Raise `sqlite3.DatabaseError` if a page is damaged."""
        if (fault := self.fetch_value("PRAGMA quick_check(1)")) != "ok":
            msg = f"the file is damaged ({fault!r}); restore it from a backup"
            raise sqlite3.DatabaseError(msg)

    def begin(self, *, durable: bool) -> None:
        """Take the write lock."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")

    def begin_reading(self) -> None:
        """Start a read transaction; its first SELECT takes the snapshot."""
        self._db.execute("BEGIN")

    def rollback(self) -> None:
        """Roll back the transaction."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def undo(self) -> None:
        """Roll back to the savepoint, if the transaction is still open."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK TO op")
            self._db.execute("RELEASE op")

    @property
    def usable(self) -> bool:
        """Whether the transaction is open; SQLite may end it itself, such as on a full disk."""
        return bool(self._db.in_transaction)
