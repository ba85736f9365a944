"""Database contract: transactions with named parameters, connections, and database drivers.

The SQL is written once, for SQLite and PostgreSQL: parameters are ``:name``, rows are tuples, and
both have ``RETURNING`` and ``ON CONFLICT``. Where the two differ, the driver fills in the word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import msgspec

from tugline.errors import Invalid, StoreError, UsageError

Row = tuple[Any, ...]
S = TypeVar("S", bound=msgspec.Struct)


def to_struct(kind: type[S], columns: str, row: Row, **changes: object) -> S:
    """A row as a struct whose fields are `columns`, separated by commas; `changes` replace some."""
    return msgspec.convert({**dict(zip(columns.split(", "), row, strict=True)), **changes}, kind)


def parse_cursor(after: str | None) -> int:
    """The place that a list continues after. Raises `Invalid`."""
    if after is None:
        return -1
    if not (after.isascii() and after.isdigit() and len(after) < 19):
        msg = f"after is {after!r}, must be the `next` of an earlier page"
        raise Invalid(msg, field="after")
    return int(after)


def bind_names(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Names of parameters for ``IN (...)``, and their values."""
    values = {f"n{n}": name for n, name in enumerate(names)}
    return ", ".join(f":{name}" for name in values), values


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

    def __init__(self, db: Any) -> None:
        """`db` is the driver's own connection."""
        super().__init__()
        self._db = db

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

    @abstractmethod
    def prepare(self) -> None:
        """Take possession and bring the tables up to date. Raises one of `errors`."""

    def migrate(self, tx: Tx, layout: int) -> None:
        """Bring the tables from `layout` to the current one. Raises `UsageError` for a newer."""
        if layout > len(STEPS):
            msg = f"store {self.place} has layout {layout}, this version reads {len(STEPS)}"
            raise UsageError(msg)
        for step in range(layout, len(STEPS)):
            for statement in _statements(step, blob=self.blob):
                tx.run(statement)

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


_FIRST = """
CREATE TABLE positions (name TEXT PRIMARY KEY, at BIGINT NOT NULL);
INSERT INTO positions VALUES
    ('events', 0), ('places', 0),
    ('tasks', 0), ('released', 0), ('sessions', 0),                       -- ever created
    ('completed', 0), ('failed', 0), ('timed_out', 0), ('cancelled', 0);  -- by final status
CREATE TABLE control (
    id INTEGER PRIMARY KEY, generation BIGINT NOT NULL, paused TEXT, version BIGINT NOT NULL
);
INSERT INTO control VALUES (1, 0, NULL, 0);
CREATE TABLE tenants (
    name TEXT PRIMARY KEY,
    weight DOUBLE PRECISION NOT NULL,
    pass DOUBLE PRECISION NOT NULL            -- sessions leased so far, divided by the weight
);
CREATE TABLE tasks (
    id TEXT PRIMARY KEY,
    place BIGINT NOT NULL UNIQUE,             -- order of submission
    tenant TEXT NOT NULL,
    priority INTEGER NOT NULL,
    body {blob} NOT NULL,                     -- the Task, packed
    digest TEXT NOT NULL,
    samples INTEGER NOT NULL,
    min_usable INTEGER,
    deadline DOUBLE PRECISION,                -- Unix seconds
    attempts INTEGER NOT NULL,
    max_staleness INTEGER,
    on_stale TEXT NOT NULL,
    callback TEXT,                            -- its URL
    usable INTEGER NOT NULL DEFAULT 0,
    ended INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    released BIGINT,                          -- position
    home TEXT,                                -- preferred node of its samples
    tags TEXT NOT NULL,                       -- JSON
    created DOUBLE PRECISION NOT NULL
);
CREATE INDEX tasks_released ON tasks (released) WHERE released IS NOT NULL;
CREATE INDEX tasks_open ON tasks (place) WHERE released IS NULL;
CREATE INDEX tasks_of_tenant ON tasks (tenant, place);
CREATE INDEX tasks_due ON tasks (deadline)
    WHERE released IS NULL AND deadline IS NOT NULL AND reason = '';
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    place BIGINT NOT NULL UNIQUE,
    task TEXT NOT NULL REFERENCES tasks (id),
    tenant TEXT NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    faults INTEGER NOT NULL DEFAULT 0,        -- failures of the harness so far
    epoch INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL,
    turn DOUBLE PRECISION NOT NULL,           -- place in its tenant's queue, Unix seconds
    node TEXT,                                -- holder of the lease
    version BIGINT NOT NULL DEFAULT 0,        -- weights when it was leased
    stop TEXT,                                -- reason it is asked to stop, while it runs
    stop_by TEXT NOT NULL DEFAULT '',
    stop_at DOUBLE PRECISION,                 -- when it was asked to
    usable INTEGER NOT NULL DEFAULT 0,        -- 1 once it has a reward
    avoid TEXT,                               -- node where the last attempt failed
    created DOUBLE PRECISION NOT NULL,
    updated DOUBLE PRECISION NOT NULL
);
CREATE INDEX sessions_queued ON sessions (tenant, turn, place) WHERE status = 'queued';
CREATE INDEX sessions_of_task ON sessions (task, sample);
CREATE INDEX sessions_of_node ON sessions (node) WHERE node IS NOT NULL;
CREATE INDEX sessions_stopping ON sessions (stop_at) WHERE stop IS NOT NULL;
CREATE INDEX sessions_by_status ON sessions (status, place);
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    token TEXT NOT NULL,                      -- SHA-256 of it, hex
    registration {blob} NOT NULL,
    state TEXT NOT NULL,
    registered DOUBLE PRECISION NOT NULL,
    deadline DOUBLE PRECISION NOT NULL,       -- when its lease ends
    applied BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX nodes_alive ON nodes (deadline) WHERE state <> 'gone';
CREATE TABLE results (
    position BIGINT PRIMARY KEY,
    session TEXT NOT NULL UNIQUE REFERENCES sessions (id),
    task TEXT NOT NULL,
    digest TEXT NOT NULL,
    blob TEXT NOT NULL,                       -- name of the blob; empty: it never ran
    view {blob} NOT NULL                      -- the ResultView, packed
);
CREATE INDEX results_of_task ON results (task, position);
CREATE TABLE events (
    position BIGINT PRIMARY KEY,
    kind TEXT NOT NULL,
    task TEXT,
    session TEXT,
    node TEXT,
    detail TEXT NOT NULL,                     -- JSON
    created DOUBLE PRECISION NOT NULL
);
CREATE INDEX events_of_task ON events (task, position) WHERE task IS NOT NULL;
CREATE TABLE consumers (
    name TEXT PRIMARY KEY, acked BIGINT NOT NULL, updated DOUBLE PRECISION NOT NULL
);
CREATE TABLE outbox (
    id BIGINT PRIMARY KEY,                    -- position of its event
    task TEXT NOT NULL,
    kind TEXT NOT NULL,
    url TEXT NOT NULL,
    host TEXT NOT NULL,                       -- of the URL, with its port
    state TEXT NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    next_try DOUBLE PRECISION NOT NULL,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX outbox_due ON outbox (host, next_try) WHERE state = 'pending';
CREATE INDEX outbox_dead ON outbox (id) WHERE state = 'dead';
"""

STEPS = (_FIRST,)
"""Step n leads from layout n to layout n + 1."""


def _statements(step: int, *, blob: str) -> list[str]:
    """The statements from layout `step` to the next; `blob` is the column type of bytes."""
    lines = (line.partition("--")[0].rstrip() for line in STEPS[step].splitlines())
    text = "\n".join(line for line in lines if line).replace("{blob}", blob)
    return [one.strip() for one in text.split(";\n") if one.strip(" ;\n")]
