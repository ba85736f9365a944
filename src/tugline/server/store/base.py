"""Database contract: transactions with named parameters, connections, and database drivers.

SQLite and PostgreSQL share the SQL: parameters are ``:name``, rows are tuples, and both have
``RETURNING`` and ``ON CONFLICT``. Where they differ, the driver supplies the keyword.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tugline.errors import Invalid, StoreError, UsageError
from tugline.protocol import PageQuery
from tugline.types import is_held_out, name_problem

Row = tuple[Any, ...]
S = TypeVar("S", bound=msgspec.Struct)


def to_struct(kind: type[S], columns: str, row: Row, **changes: object) -> S:
    """Convert a row of comma-separated `columns` to a struct; `changes` replace values."""
    return msgspec.convert({**dict(zip(columns.split(", "), row, strict=True)), **changes}, kind)


def match_columns(**columns: str | Sequence[str] | None) -> tuple[str, dict[str, object]]:
    """Return a condition, and its values: each column equals a value or is in a list; None: any."""
    given = {name: value for name, value in columns.items() if value is not None}
    signs = {name: "=" if isinstance(value, str) else "IN" for name, value in given.items()}
    where = "".join(f" AND {name} {sign} :{name}" for name, sign in signs.items())
    return where, {n: str(value) if isinstance(value, str) else value for n, value in given.items()}


_PLACE = re.compile(r"[0-9]{1,18}", re.ASCII)
_VALUE_AND_PLACE = re.compile(r"(-?[0-9.]{1,25}(?:e[+-]?[0-9]{1,3})?),([0-9]{1,18})", re.ASCII)


def parse_cursor(cursor: str) -> int:
    """Return the place of a cursor of `cut_page`. Raises `Invalid`."""
    if not _PLACE.fullmatch(cursor):
        msg = f"after is {cursor!r}, must be the `next` of an earlier page of the same order"
        raise Invalid(msg, field="after")
    return int(cursor)


def parse_ordered_cursor(cursor: str) -> tuple[float, int]:
    """Return value and place of a cursor, ``VALUE,PLACE``, of `cut_ordered`. Raises `Invalid`."""
    found = _VALUE_AND_PLACE.fullmatch(cursor)
    with suppress(ValueError):
        if found and math.isfinite(value := float(found[1])):
            return value, int(found[2])
    msg = f"after is {cursor!r}, must be the `next` of an earlier page of the same order"
    raise Invalid(msg, field="after")


def cut_page(rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
    """Return the rows of a page, and the cursor of the next page."""
    return rows[:limit], str(rows[limit - 1][1]) if len(rows) > limit else None


def cut_ordered(rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], str | None]:
    """Return the rows of a page in order of their last column, without it, and the next cursor.

    The cursor has the value as well as the place, since a value may change between the pages.
    """
    last = f"{float(rows[limit - 1][-1])!r},{rows[limit - 1][1]}" if len(rows) > limit else None
    return [row[:-1] for row in rows[:limit]], last


def expand_lists(sql: str, values: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Replace a list, after ``IN``, by a parameter for each item; an empty list matches nothing."""
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
    """Open transaction."""

    now: float = 0.0
    """Start of the transaction in Unix seconds; operations use no other clock."""
    opened: float = 0.0
    """Time at which this server opened the database."""

    matching: str
    """``FROM`` and ``WHERE`` for texts with all `:words`; a word that ends in ``*`` is a prefix.

    `:tasks` is true for texts of tasks, false for texts of sessions.
    """

    def __init__(self, db: Any) -> None:
        """`db` is the driver's own connection."""
        self._db = db
        self.topics: set[str] = set()
        """Topics to notify after the commit."""

    def count_since(self, time: float) -> float:
        """Return the seconds since `time` in which this server was running."""
        return max(0.0, self.now - max(time, self.opened))

    def translate(self, sql: str) -> Any:
        """Convert the parameters of a statement to the driver's syntax."""
        return sql

    def execute(self, sql: str, values: Mapping[str, object]) -> Any:
        """Run a statement; return the driver's cursor."""
        return self._db.execute(self.translate(sql), values)

    def many(self, sql: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Run the same statement for each of `rows`; PostgreSQL pipelines them."""
        self._db.cursor().executemany(self.translate(sql), rows)

    def all(self, sql: str, **values: object) -> list[Row]:
        """Return all rows. A value may be a list, after ``IN``."""
        rows: list[Row] = self.execute(*expand_lists(sql, values)).fetchall()
        return rows

    def column(self, sql: str, **values: object) -> list[Any]:
        """Return the first value of each row."""
        return [row[0] for row in self.all(sql, **values)]

    def fetch_value(self, sql: str, /, **values: object) -> Any:
        """Return the first value of the first row; None if there is no row."""
        return next(iter(self.column(sql, **values)), None)

    def require_one(self, sql: str, missing: Exception, **values: object) -> Row:
        """Return the first row. Raises `missing` if there is none."""
        rows = self.all(sql, **values)
        if not rows:
            raise missing
        return rows[0]

    def read_after(
        self,
        rows: str,
        key: str,
        after: int,
        limit: int,
        *,
        where: str = "",
        **match: str | Sequence[str] | None,
    ) -> list[Row]:
        """Return up to `limit` rows after `after` by `key`; `match` is as in `match_columns`.

        `rows` is ``COLUMNS FROM TABLE``; `where` has further conditions, after ``AND``.
        """
        also, values = match_columns(**match)
        sql = f"SELECT {rows} WHERE {key} > :after{where}{also} ORDER BY {key} LIMIT :limit"
        return self.all(sql, after=after, limit=limit, **values)

    def read_page(self, rows: str, where: str, query: PageQuery, **values: object) -> list[Row]:
        """Return the rows of a page in order of ``place``, and the next row, for `cut_page`.

        `rows` is ``COLUMNS FROM TABLE``, with ``place`` as second column. Raises `Invalid` for an
        invalid cursor.
        """
        side, order, start = ("<", "DESC", 2**63 - 1) if query.newest else (">", "ASC", -1)
        if query.after is not None:
            start = parse_cursor(query.after)
        return self.all(
            f"SELECT {rows} WHERE place {side} :after{where} ORDER BY place {order} LIMIT :limit",
            after=start,
            limit=query.limit + 1,
            **values,
        )

    def run(self, sql: str, **values: object) -> int:
        """Run a statement; return the number of changed rows. A value may be a list."""
        changed: int = self.execute(*expand_lists(sql, values)).rowcount
        return changed

    def insert(self, table: str, *rows: Mapping[str, object]) -> None:
        """Insert rows with the same columns."""
        for columns in rows[:1]:
            names = ", ".join(columns)
            values = ", ".join(f":{name}" for name in columns)
            self.many(f"INSERT INTO {table} ({names}) VALUES ({values})", rows)  # noqa: S608 - constants

    def update(self, table: str, row: str, **columns: object) -> None:
        """Set these columns of the row with this id."""
        changes = ", ".join(f"{name} = :{name}" for name in columns)
        self.run(f"UPDATE {table} SET {changes} WHERE id = :row", row=row, **columns)  # noqa: S608 - constants

    def advance(self, counter: str, by: int = 1) -> int:
        """Add to a counter of ``positions``; return its new value."""
        sql = "UPDATE positions SET at = at + :by WHERE name = :counter RETURNING at"
        return int(self.fetch_value(sql, counter=counter, by=by))

    def notify(self, *topics: str) -> None:
        """Wake subscribers of these topics, on every server, after the commit."""
        self.topics.update(topics)


class Connection(Tx, ABC):
    """Open connection with its transaction. Raises errors that `Driver.explain` takes."""

    def check_pages(self) -> None:
        """Raise an error of the driver if a page is damaged, where that can be checked."""
        return

    @abstractmethod
    def begin(self, *, durable: bool) -> None:
        """Start a write transaction, exclusively among all servers."""

    @abstractmethod
    def begin_reading(self) -> None:
        """Start a read transaction on a single snapshot."""

    def commit(self) -> None:
        """Commit; a durable transaction is on disk when this returns."""
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Roll back the transaction, or end a read transaction."""
        self._db.execute("ROLLBACK")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Set a savepoint; undo the block's changes if it raises."""
        self._db.execute("SAVEPOINT op")
        try:
            yield
        except BaseException:
            self.undo()
            raise
        self._db.execute("RELEASE op")

    @abstractmethod
    def undo(self) -> None:
        """Roll back to the savepoint, if the transaction is still open."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether the transaction is still open after a rollback to a savepoint."""

    def close(self) -> None:
        """Close the connection; the database rolls back an open transaction."""
        self._db.close()


FULL = "; free some space; no acknowledged data is lost"


class Driver(ABC):
    """Driver of a kind of database."""

    name: str
    errors: tuple[type[Exception], ...]
    """Base classes of the driver's errors."""
    operation_errors: tuple[type[Exception], ...]
    """Subset of `errors` that an operation causes, so that a retry cannot help."""

    location: str
    """Address of the database for messages, without secrets."""
    blob: str
    """Column type of bytes."""
    now: str
    """SQL expression for the current time in Unix seconds."""

    @abstractmethod
    def prepare(self) -> None:
        """Lock the database if needed and migrate its tables. Raises an error in `errors`."""

    def migrate(self, tx: Tx, layout: int) -> None:
        """Migrate the tables from `layout`. Raises `UsageError` for a newer one."""
        if layout > len(STEPS):
            msg = (
                f"store {self.location} has layout {layout}, but this release reads layout "
                f"{len(STEPS)} at most"
            )
            raise UsageError(msg)
        for step in range(layout, len(STEPS)):
            self._run_all(tx, STEPS[step])
            if step + 1 == _FILLED:
                _fill_sessions(tx)
                self._run_all(tx, read_sql("layout_8_indexes"))

    def _run_all(self, tx: Tx, text: str) -> None:
        """Run the statements of a migration."""
        terms = {"sqlite": "--", "postgresql": "--", self.name: "", "blob": self.blob}
        for statement in _statements(text, terms):
            tx.run(statement)

    @abstractmethod
    def connect(self, *, reading: bool = False) -> Connection:
        """Open a connection."""

    def explain(self, error: Exception) -> StoreError:
        """Convert an error to a `StoreError`, with advice."""
        text = " ".join(str(error).split())
        return StoreError(f"store {self.location}: {text}{self.advise(error)}")

    @abstractmethod
    def advise(self, error: Exception) -> str:
        """Return the advice after the text of an error; `FULL` if there is no space."""

    def is_lost(self, error: Exception) -> bool:
        """Whether a new connection may solve the error."""
        return False

    def listen(
        self, receive: Callable[[Iterable[str] | None], None]
    ) -> AbstractContextManager[None]:
        """Receive notifications of other servers during the block; None if some may be missed."""
        return nullcontext()

    def release(self) -> None:
        """Release the lock of `prepare`."""
        return


def read_sql(name: str) -> str:
    """Read an SQL file of this package."""
    return Path(__file__).with_name(f"{name}.sql").read_text(encoding="utf-8")


STEPS = tuple(read_sql(f"layout_{n}") for n in range(1, 10))
"""Migrations; step n leads from layout n to layout n + 1."""


_FILLED = 8
"""Layout from which on sessions have the columns of `_fill_sessions`."""
_FILL_BATCH = 1000


def _fill_sessions(tx: Tx) -> None:
    """Write problem, reward and seconds of sessions from their tasks and results, in batches."""
    rows = (
        "s.place, s.task, t.tags, r.view FROM sessions s JOIN tasks t ON t.id = s.task"
        " LEFT JOIN results r ON r.session = s.id"
    )
    after = -1
    while batch := tx.read_after(rows, "s.place", after, _FILL_BATCH):
        tx.many(
            "UPDATE sessions SET problem = :problem, held_out = :held_out, reward = :reward,"
            " seconds = :seconds WHERE place = :place",
            [_describe(*row) for row in batch],
        )
        after = batch[-1][0]


def _describe(place: int, task: str, tags: str, view: bytes | None) -> dict[str, object]:
    """Return the columns of a session that `_fill_sessions` writes."""
    known = msgspec.json.decode(tags)
    result = {} if view is None else msgspec.msgpack.decode(view)
    return {
        "place": place,
        "problem": name_problem(task, known),
        "held_out": int(is_held_out(task, known)),
        "reward": result.get("reward"),
        "seconds": sum_seconds(result.get("seconds", {})),
    }


def sum_seconds(stages: Mapping[str, float]) -> float | None:
    """Return the seconds of all stages of a session; None if it never ran."""
    return sum(stages.values()) if stages else None


def _statements(text: str, terms: Mapping[str, str]) -> list[str]:
    """Split a migration into statements, with the driver's `terms` for ``{name}``."""
    for name, word in terms.items():
        text = text.replace(f"{{{name}}}", word)
    lines = (line.partition("--")[0].rstrip() for line in text.splitlines())
    text = "\n".join(line for line in lines if line)
    return [part.strip() for part in text.split(";\n") if part.strip(" ;\n")]
