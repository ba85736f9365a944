"""What the tables' modules see of a database: named parameters, rows, and one transaction.

The SQL is written once, for SQLite and PostgreSQL: parameters are ``:name``, rows are tuples,
``RETURNING`` and ``ON CONFLICT`` are there. Where the two differ, `Tx.dialect` has the word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tugline.errors import StoreError

Row = tuple[Any, ...]


class Dialect(NamedTuple):
    """The words that differ."""

    name: str
    blob: str
    """Column type of bytes."""
    skip_locked: str
    """Ends a SELECT whose rows other servers must not take too; empty where there is one server."""


class Tx(Protocol):
    """An open transaction; everything in it happens or nothing."""

    dialect: Dialect

    def all(self, sql: str, **values: object) -> list[Row]:
        """All rows."""
        ...

    def one(self, sql: str, **values: object) -> Row | None:
        """The first row, or None."""
        ...

    def run(self, sql: str, **values: object) -> int:
        """How many rows it changed."""
        ...

    def many(self, sql: str, rows: Iterable[Mapping[str, object]]) -> None:
        """The same statement for each of `rows`."""
        ...

    def wake(self, *topics: str) -> None:
        """Wake who waits for these topics, on every server, once this transaction is committed."""
        ...


class Connection(Protocol):
    """An open connection. Its errors are those that `Store.explain` knows."""

    @property
    def topics(self) -> set[str]:
        """What the last transaction wakes."""
        ...

    def begin(self, *, durable: bool) -> Tx:
        """Open a transaction that may write, alone among all servers."""
        ...

    def begin_reading(self) -> Tx:
        """Open one that sees a single state."""
        ...

    def commit(self) -> None:
        """On the disk when this returns, if it was begun as durable."""
        ...

    def rollback(self) -> None:
        """Forget the transaction, or end one that only read."""
        ...

    def savepoint(self) -> AbstractContextManager[None]:
        """What is done within it is undone if an error leaves it."""
        ...

    @property
    def usable(self) -> bool:
        """Whether the transaction goes on after an error that a savepoint has undone."""
        ...

    def close(self) -> None:
        """Let go. Never raises."""
        ...


class Store(Protocol):
    """A kind of database."""

    name: str
    errors: tuple[type[Exception], ...]
    """What its driver raises."""
    mistakes: tuple[type[Exception], ...]
    """Those among them that are an operation's own fault, so that waiting mends nothing."""

    def prepare(self) -> None:
        """Take possession and bring the tables up to date."""
        ...

    def connect(self, *, reading: bool = False) -> Connection:
        """A new connection."""
        ...

    def explain(self, error: Exception) -> StoreError:
        """The same in words that say what to do."""
        ...

    def lost(self, error: Exception) -> bool:
        """Whether a new connection may mend it."""
        ...

    def listen(self, hear: Callable[[Iterable[str] | None], None]) -> AbstractContextManager[None]:
        """Pass on what other servers wake; None for "anything may have happened"."""
        ...

    def release(self) -> None:
        """Give up possession."""
        ...
