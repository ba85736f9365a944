"""Database contract: transactions with named parameters, connections, and database drivers.

The SQL is written once, for SQLite and PostgreSQL: parameters are ``:name``, rows are tuples, and
both have ``RETURNING`` and ``ON CONFLICT``. Where the two differ, the driver fills in the word.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tugline.errors import Invalid, StoreError, UsageError
from tugline.protocol import PageQuery

Row = tuple[Any, ...]
S = TypeVar("S", bound=msgspec.Struct)


def to_struct(kind: type[S], columns: str, row: Row, **changes: object) -> S:
    """A row as a struct whose fields are `columns`, separated by commas; `changes` replace some."""
    return msgspec.convert({**dict(zip(columns.split(", "), row, strict=True)), **changes}, kind)


def match_columns(**columns: str | Sequence[str] | None) -> tuple[str, dict[str, object]]:
    """A condition on these columns, and its values: one, or one of several; None is any."""
    given = {name: value for name, value in columns.items() if value is not None}
    signs = {name: "=" if isinstance(value, str) else "IN" for name, value in given.items()}
    where = "".join(f" AND {name} {sign} :{name}" for name, sign in signs.items())
    return where, {n: str(value) if isinstance(value, str) else value for n, value in given.items()}


def cut_page(rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
    """The rows of a page, and the cursor of the next one."""
    return rows[:limit], str(rows[limit - 1][1]) if len(rows) > limit else None


def expand_lists(sql: str, values: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Give each item of a list a parameter of its own, for ``IN``; nothing is among no items."""
    bound: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple | set):
            items = {f"{name}_{n}": item for n, item in enumerate(value)}
            names = ", ".join(f":{item}" for item in items) or "NULL"
            sql = re.sub(rf":{name}\b", f"({names})", sql)
            bound |= items
        else:
            bound[name] = value
    return sql, bound


class Tx:
    """An open transaction; all of it takes effect or nothing."""

    now: float = 0.0
    """When it began, Unix seconds; the only clock of the operations in it."""

    matching: str
    """``FROM`` and ``WHERE`` of the texts with `:words`, of which ``*`` ends a beginning.

    `:tasks` says whether those of tasks or those of sessions are read.
    """

    def __init__(self, db: Any) -> None:
        """`db` is the driver's own connection."""
        self._db = db
        self.topics: set[str] = set()
        """Topics that its commit notifies."""

    def translate(self, sql: str) -> Any:
        """A statement with its parameters as the driver writes them."""
        return sql

    def execute(self, sql: str, values: Mapping[str, object]) -> Any:
        """Run a statement; returns the driver's cursor."""
        return self._db.execute(self.translate(sql), values)

    def many(self, sql: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Run the same statement for each of `rows`; PostgreSQL pipelines them."""
        self._db.cursor().executemany(self.translate(sql), rows)

    def all(self, sql: str, **values: object) -> list[Row]:
        """All rows. A value may be a list, after ``IN``."""
        rows: list[Row] = self.execute(*expand_lists(sql, values)).fetchall()
        return rows

    def column(self, sql: str, **values: object) -> list[Any]:
        """The first value of all rows."""
        return [row[0] for row in self.all(sql, **values)]

    def fetch_value(self, sql: str, /, **values: object) -> Any:
        """The first value of the first row; None if there is no row."""
        return next(iter(self.column(sql, **values)), None)

    def require_one(self, sql: str, missing: Exception, **values: object) -> Row:
        """The first row. Raises `missing` if there is none."""
        rows = self.all(sql, **values)
        if not rows:
            raise missing
        return rows[0]

    def read_after(
        self, rows: str, key: str, after: int, limit: int, **match: str | Sequence[str] | None
    ) -> list[Row]:
        """Up to `limit` rows behind `after` in the order of `key`; `match` is for `match_columns`.

        `rows` is ``COLUMNS FROM TABLE``.
        """
        where, values = match_columns(**match)
        sql = f"SELECT {rows} WHERE {key} > :after{where} ORDER BY {key} LIMIT :limit"
        return self.all(sql, after=after, limit=limit, **values)

    def read_places(self, rows: str, where: str, query: PageQuery, **values: object) -> list[Row]:
        """Rows of a page in the order of their places, and the one after it, for `cut_page`.

        `rows` is ``COLUMNS FROM TABLE``, the second column the place. Raises `Invalid` for a cursor
        that is none.
        """
        side, order, start = ("<", "DESC", 2**63 - 1) if query.newest else (">", "ASC", -1)
        if query.after is not None:
            if not (query.after.isascii() and query.after.isdigit() and len(query.after) < 19):
                msg = f"after is {query.after!r}, must be the `next` of an earlier page"
                raise Invalid(msg, field="after")
            start = int(query.after)
        return self.all(
            f"SELECT {rows} WHERE place {side} :after{where} ORDER BY place {order} LIMIT :limit",
            after=start,
            limit=query.limit + 1,
            **values,
        )

    def run(self, sql: str, **values: object) -> int:
        """Run a statement; returns the number of changed rows. A value may be a list."""
        changed: int = self.execute(*expand_lists(sql, values)).rowcount
        return changed

    def insert(self, table: str, *rows: Mapping[str, object]) -> None:
        """Insert rows with the same columns."""
        for columns in rows[:1]:
            names, values = ", ".join(columns), ", ".join(f":{name}" for name in columns)
            self.many(f"INSERT INTO {table} ({names}) VALUES ({values})", rows)  # noqa: S608 - constants

    def update(self, table: str, row: str, **columns: object) -> None:
        """Set these columns of the row with this id."""
        changes = ", ".join(f"{name} = :{name}" for name in columns)
        self.run(f"UPDATE {table} SET {changes} WHERE id = :row", row=row, **columns)  # noqa: S608 - constants

    def advance(self, counter: str, by: int = 1) -> int:
        """Add to a counter of ``positions``; returns its new value."""
        sql = "UPDATE positions SET at = at + :by WHERE name = :counter RETURNING at"
        return int(self.fetch_value(sql, counter=counter, by=by))

    def notify(self, *topics: str) -> None:
        """Wake subscribers of these topics, on every server, once this transaction is committed."""
        self.topics.update(topics)


class Connection(Tx, ABC):
    """An open connection and its transaction in one. Raises what `Driver.explain` knows."""

    def check_pages(self) -> None:
        """Raise one of the driver's errors if a page is damaged, where it can tell."""
        return

    @abstractmethod
    def begin(self, *, durable: bool) -> None:
        """Start a transaction that may write, alone among all servers."""

    @abstractmethod
    def begin_reading(self) -> None:
        """Start a transaction that sees a single state."""

    def commit(self) -> None:
        """Commit; flushed to disk when this returns, if begun as durable."""
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction, or end one that only read."""
        self._db.execute("ROLLBACK")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what is done within if an error leaves it."""
        self._db.execute("SAVEPOINT op")
        try:
            yield
        except BaseException:
            self.undo()
            raise
        self._db.execute("RELEASE op")

    @abstractmethod
    def undo(self) -> None:
        """Return to the savepoint, if the transaction is still there."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether the transaction continues after an error that a savepoint has undone."""

    def close(self) -> None:
        """Close it; the database undoes what was not committed."""
        self._db.close()


FULL = "; free some space, nothing that was acknowledged is lost"


class Driver(ABC):
    """A kind of database."""

    name: str
    errors: tuple[type[Exception], ...]
    """Base classes of the driver's errors."""
    mistakes: tuple[type[Exception], ...]
    """Those that are an operation's own fault, so that a retry cannot help."""

    place: str
    """Where it is, for people, without secrets."""
    blob: str
    """Its column type of bytes."""
    now: str
    """The present as an expression of SQL, in Unix seconds."""

    @abstractmethod
    def prepare(self) -> None:
        """Take possession and bring the tables up to date. Raises one of `errors`."""

    def migrate(self, tx: Tx, layout: int) -> None:
        """Bring the tables from `layout` to the current one. Raises `UsageError` for a newer."""
        if layout > len(STEPS):
            msg = f"store {self.place} has layout {layout}, this version reads {len(STEPS)}"
            raise UsageError(msg)
        for step in range(layout, len(STEPS)):
            terms = {"sqlite": "--", "postgresql": "--", self.name: "", "blob": self.blob}
            for statement in _statements(STEPS[step], terms):
                tx.run(statement)

    @abstractmethod
    def connect(self, *, reading: bool = False) -> Connection:
        """Open a connection."""

    def explain(self, error: Exception) -> StoreError:
        """Wrap an error, with advice."""
        text = " ".join(str(error).split())
        return StoreError(f"store {self.place}: {text}{self.advise(error)}")

    @abstractmethod
    def advise(self, error: Exception) -> str:
        """What follows the text of an error; `FULL` if there is no space."""

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


def read_sql(name: str) -> str:
    """Read a file of SQL beside this one."""
    return Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")


STEPS = tuple(read_sql(f"layout_{n}") for n in range(1, 7))
"""Step n leads from layout n to layout n + 1."""


def _statements(text: str, terms: Mapping[str, str]) -> list[str]:
    """The statements of a step, with the driver's words in the place of their names."""
    for name, word in terms.items():
        text = text.replace(f"{{{name}}}", word)
    lines = (line.partition("--")[0].rstrip() for line in text.splitlines())
    text = "\n".join(line for line in lines if line)
    return [one.strip() for one in text.split(";\n") if one.strip(" ;\n")]
