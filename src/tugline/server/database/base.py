"""What the tables' modules see of a database: named parameters, rows, and one transaction.

The SQL is written once, for SQLite and PostgreSQL: parameters are ``:name``, rows are tuples,
``RETURNING`` and ``ON CONFLICT`` are there. Where the two differ, `Tx.dialect` has the word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

Row = tuple[Any, ...]


class Dialect(NamedTuple):
    """The words that differ."""

    name: str
    blob: str
    """Column type of bytes."""
    skip_locked: str
    """Ends a SELECT whose rows other servers must not take too; empty where there is one writer."""


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
