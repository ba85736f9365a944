"""Database contract: transactions with named parameters, connections, and database drivers.

The SQL is written once, for SQLite and PostgreSQL: parameters are ``:name``, rows are tuples, and
both have ``RETURNING`` and ``ON CONFLICT``. Where the two differ, the driver fills in the word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import msgspec

from tugline.errors import StoreError

Row = tuple[Any, ...]
S = TypeVar("S", bound=msgspec.Struct)


def to_struct(kind: type[S], columns: str, row: Row, **changes: object) -> S:
    """A row as a struct whose fields are `columns`, separated by commas; `changes` replace some."""
    return msgspec.convert({**dict(zip(columns.split(", "), row, strict=True)), **changes}, kind)


class Tx(ABC):
    """An open transaction; all of it takes effect or nothing."""

    now: float = 0.0
    """When it began, Unix seconds; the only clock of the operations in it."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        """Topics that its commit notifies."""

    @abstractmethod
    def execute(self, sql: str, values: Mapping[str, object]) -> Any:
        """Run a statement; returns the driver's cursor."""

    @abstractmethod
    def many(self, sql: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Run the same statement for each of `rows`."""

    def all(self, sql: str, **values: object) -> list[Row]:
        """All rows."""
        rows: list[Row] = self.execute(sql, values).fetchall()
        return rows

    def fetch_one(self, sql: str, **values: object) -> Row | None:
        """The first row, or None."""
        rows = self.all(sql, **values)
        return rows[0] if rows else None

    def run(self, sql: str, **values: object) -> int:
        """Run a statement; returns the number of changed rows."""
        changed: int = self.execute(sql, values).rowcount
        return changed

    def notify(self, *topics: str) -> None:
        """Wake subscribers of these topics, on every server, once this transaction is committed."""
        self.topics.update(topics)


class Connection(Tx):
    """An open connection and its transaction in one. Raises what `Driver.explain` knows."""

    @abstractmethod
    def begin(self, *, durable: bool) -> None:
        """Start a transaction that may write, alone among all servers."""

    @abstractmethod
    def begin_reading(self) -> None:
        """Start a transaction that sees a single state."""

    @abstractmethod
    def commit(self) -> None:
        """Commit; flushed to disk when this returns, if begun as durable."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo the transaction, or end one that only read."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[None]:
        """Undo what is done within if an error leaves it."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether the transaction continues after an error that a savepoint has undone."""

    @abstractmethod
    def close(self) -> None:
        """Close it. Never raises."""


class Driver(ABC):
    """A kind of database."""

    name: str
    errors: tuple[type[Exception], ...]
    """Base classes of the driver's errors."""
    mistakes: tuple[type[Exception], ...]
    """Those that are an operation's own fault, so that a retry cannot help."""

    @abstractmethod
    def prepare(self) -> None:
        """Take possession and bring the tables up to date."""

    @abstractmethod
    def connect(self, *, reading: bool = False) -> Connection:
        """Open a connection."""

    @abstractmethod
    def explain(self, error: Exception) -> StoreError:
        """Wrap an error, with advice."""

    def is_lost(self, error: Exception) -> bool:
        """Whether a new connection may help."""
        return False

    def listen(
        self, receive: Callable[[Iterable[str] | None], None]
    ) -> AbstractContextManager[None]:
        """Pass on notifications of other servers; None for "anything may have happened"."""
        return nullcontext()

    def release(self) -> None:
        """Give up possession."""
        return
