from __future__ import annotations

import asyncio
import contextlib
import errno
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.control_plane import Earlier, limited_files, submit
from support.tasks import make_task
from tugline.errors import Missing, StoreError, UsageError
from tugline.server.store import base
from tugline.server.store.base import STEPS, Tx
from tugline.server.store.database import Database, open_database
from tugline.server.store.sqlite import Sqlite


def _add(name: str, *, fail: bool = False) -> Any:
    def op(tx: Tx) -> str:
        tx.run("INSERT INTO consumers VALUES (:name, 0, 0)", name=name)
        if fail:
            msg = f"no {name}"
            raise Missing(msg)
        return name

    return op


async def _block(
    database: Database, gate: threading.Event, op: Callable[[Tx], object] = lambda _tx: None
) -> asyncio.Future[bool]:
    """A write that runs `op` and then holds its transaction open until `gate` is set."""
    begun = threading.Event()

    def hold(tx: Tx) -> bool:
        op(tx)
        begun.set()
        return gate.wait(5)

    writing = asyncio.ensure_future(database.write(hold))
    assert await asyncio.to_thread(begun.wait, 5)
    return writing


def _names(tx: Tx) -> list[str]:
    return [name for (name,) in tx.all("SELECT name FROM consumers ORDER BY name")]


async def test_writes_of_many_callers_share_one_commit(database: Database) -> None:
    """Writes that queue up share one transaction; each caller gets its own return value."""
    batches: list[int] = []
    database.on_commit = lambda ops, _seconds: batches.append(ops)
    gate = threading.Event()
    first = await _block(database, gate)
    others = [asyncio.ensure_future(database.write(_add(f"n{n:02}"))) for n in range(40)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*others) == [f"n{n:02}" for n in range(40)]
    assert await first is True
    assert batches == [1, 40]
    assert len(await database.read(_names)) == 40


async def test_a_failed_write_does_not_affect_others(database: Database) -> None:
    """An operation that fails is rolled back alone; others of the same batch are committed."""
    gate = threading.Event()
    blocking = await _block(database, gate)
    ops = [_add("a"), _add("b", fail=True), _add("a"), _add("c")]
    waiting = asyncio.gather(*map(database.write, ops), return_exceptions=True)
    await asyncio.sleep(0)
    gate.set()
    a, b, again, c = await waiting
    await blocking
    assert (a, c) == ("a", "c")
    assert isinstance(b, Missing)
    assert isinstance(again, Exception)
    assert not isinstance(again, StoreError | Missing), "a mistake is nothing to wait out"
    assert await database.read(_names) == ["a", "c"]


async def test_reads_do_not_wait_for_a_write(database: Database) -> None:
    """A read during an open transaction returns at once and does not see it."""
    gate = threading.Event()

    writing = await _block(database, gate, _add("late"))
    assert await asyncio.wait_for(database.read(_names), 20) == []
    gate.set()
    await writing
    assert await database.read(_names) == ["late"]


async def _wait_until_listening(database: Database, store_url: str) -> None:
    """Wait until `database` listens to other servers' notifications."""
    loop = asyncio.get_running_loop()
    with (
        database.hub.subscribe("elsewhere") as subscription,
        psycopg.connect(store_url, autocommit=True) as db,
    ):
        for _ in range(100):
            db.execute("NOTIFY tugline, 'elsewhere'")
            if await subscription.wait(loop.time() + 0.1):
                return
    pytest.fail("no notification of another server was heard in 10 s")


async def test_notifications_follow_the_commit(database: Database, store_url: str) -> None:
    """A notified reader sees what it was notified of."""

    def op(tx: Tx) -> None:
        _add("here")(tx)
        tx.notify("topic")

    loop = asyncio.get_running_loop()
    if database.name == "postgresql":
        await _wait_until_listening(database, store_url)
    with database.hub.subscribe("topic") as subscription:
        writing = asyncio.ensure_future(database.write(op))
        assert await subscription.wait(loop.time() + 5)
        assert await database.read(_names) == ["here"]
        await writing
    assert not database.hub.topics


async def test_a_closed_store_refuses_operations(store_url: str) -> None:
    """Operations fail at once instead of waiting for ever."""
    async with open_database(store_url) as database:
        pass
    for ask in (database.read, database.write):
        with pytest.raises(StoreError, match="being stopped"):
            await ask(_names)


async def test_servers_can_start_at_the_same_time_on_postgres(postgres_url: str) -> None:
    """One server creates the tables, and the others find them."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [open_database(postgres_url) for _ in range(3)]
        await asyncio.gather(*map(stack.enter_async_context, opened))
        await opened[0].write(_add("one"))
        assert await opened[2].read(_names) == ["one"]


async def test_servers_notify_each_other_on_postgres(postgres_url: str) -> None:
    """A commit of one server notifies subscribers of another."""
    async with open_database(postgres_url) as one, open_database(postgres_url) as other:
        await _wait_until_listening(other, postgres_url)
        with other.hub.subscribe("topic") as subscription:
            await one.write(lambda tx: tx.notify("topic", *(f"node:{n}" for n in range(2000))))
            assert await subscription.wait(asyncio.get_running_loop().time() + 5)


def _make_aliases(path: Path) -> list[Path]:
    """All names of a file, after its lock file was deleted."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    soft, hard, folder = (path.with_name(name) for name in ("soft.db", "hard.db", "folder"))
    soft.symlink_to(path)
    hard.hardlink_to(path)
    folder.symlink_to(path.parent)
    return [path, soft, hard, folder / path.name]


async def test_a_second_server_on_the_same_file_is_refused(tmp_path: Path) -> None:
    """The lock belongs to the file: neither links nor a deleted lock file get around it.

    SQLite would let a second server in, and both would give orders to the same nodes.
    """
    async with open_database(f"sqlite:{tmp_path / 'a.db'}") as database:
        for name in _make_aliases(tmp_path / "a.db"):
            with pytest.raises(UsageError, match=rf"{name} is in use by another server"):
                async with open_database(f"sqlite:{name}"):
                    pass
        await database.write(_add("still here"))


async def test_a_damaged_database_is_refused_at_start(tmp_path: Path) -> None:
    """A page of zeros is an error, though SQLite alone would read it as an empty table."""
    path = tmp_path / "a.db"
    async with open_database(f"sqlite:{path}"):
        pass
    with path.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(4096))
    with pytest.raises(StoreError, match=r"damaged .*restore it from a backup|malformed"):
        async with open_database(f"sqlite:{path}"):
            pass


async def test_a_store_of_an_earlier_version_is_migrated(
    store_url: str, open_earlier: Earlier
) -> None:
    """Rows stay, new columns have their defaults, and a second start changes nothing."""
    async with open_earlier(1) as database:
        await database.write(
            lambda tx: tx.run(
                "INSERT INTO tasks (id, place, tenant, priority, body, digest, samples,"
                " attempts, on_stale, tags, created)"
                " VALUES ('t', 1, 'a', 0, :body, 'd', 1, 3, 'mark', '{}', 0)",
                body=b"old",
            )
        )
    for _ in range(2):
        async with open_database(store_url) as database:
            [row] = await database.read(lambda tx: tx.all("SELECT id, body, retry_s FROM tasks"))
            assert (row[0], bytes(row[1]), row[2]) == ("t", b"old", 3600)


async def test_sessions_of_an_earlier_version_are_filled_in_batches(
    store_url: str, open_earlier: Earlier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New columns are written a batch at a time, before they have an index."""
    async with open_earlier(7) as database:
        for task in ("a", "b", "c"):
            await database.write(submit, make_task(task, samples=3))
    monkeypatch.setattr(base, "_FILL_BATCH", 4)
    seen: list[str] = []
    batches: list[int] = []
    execute, many = Tx.execute, Tx.many

    def execute_noted(tx: Tx, sql: str, values: dict[str, object]) -> Any:
        seen.append(sql)
        return execute(tx, sql, values)

    def many_noted(tx: Tx, sql: str, rows: list[dict[str, object]]) -> None:
        seen.append(sql)
        batches.append(len(rows))
        many(tx, sql, rows)

    monkeypatch.setattr(Tx, "execute", execute_noted)
    monkeypatch.setattr(Tx, "many", many_noted)
    async with open_database(store_url) as database:
        filled = await database.read(lambda tx: tx.all("SELECT problem FROM sessions ORDER BY id"))
    assert filled == [(name,) for name in "aaabbbccc"]
    assert batches == [4, 4, 1]
    last = max(at for at, sql in enumerate(seen) if sql.startswith("UPDATE sessions"))
    indexes = [at for at, sql in enumerate(seen) if sql.startswith("CREATE INDEX sessions_")]
    assert len(indexes) == 6
    assert last < min(indexes)


async def test_a_migration_has_no_time_limit_on_postgres(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large store takes longer than a statement of a server may; afterwards the limit is back."""
    names = ("statement_timeout", "enable_seqscan", "enable_bitmapscan", "enable_hashjoin")

    def read(tx: Tx) -> list[str]:
        return [tx.fetch_value(f"SHOW {name}") for name in names]

    seen: list[list[str]] = []
    migrate = base.Driver.migrate

    def noted(driver: base.Driver, tx: Tx, layout: int) -> None:
        seen.append(read(tx))
        migrate(driver, tx, layout)

    monkeypatch.setattr(base.Driver, "migrate", noted)
    async with open_database(postgres_url) as database:
        assert await database.write(read) == ["1min", "off", "off", "off"]
    assert seen == [["0", "on", "on", "on"]]


async def test_a_store_of_a_later_version_is_refused(store_url: str, open_earlier: Earlier) -> None:
    """The message names both layouts."""
    async with open_database(store_url):
        pass
    with pytest.raises(
        UsageError, match=f"layout {len(STEPS)}, but this release reads layout 3 at most"
    ):
        async with open_earlier(3):
            pass


@pytest.mark.parametrize("url", ["mysql://x", "sqlite:", "tugline.db"])
def test_an_unknown_store_url_is_refused(url: str) -> None:
    """The message names the accepted forms."""
    with pytest.raises(UsageError, match="must be sqlite:PATH or postgresql://"):
        open_database(url)


async def test_an_unreachable_postgres_is_reported() -> None:
    """The message has the URL without its password."""
    with pytest.raises(StoreError, match=r"postgresql://127\.0\.0\.1:1/x") as caught:
        async with open_database("postgresql://me:secret@127.0.0.1:1/x", retry_s=0):
            pass
    assert "secret" not in str(caught.value)


class _Starting(Sqlite):
    """A database that refuses two connections, as PostgreSQL does while it starts."""

    refusals = 2

    def prepare(self) -> None:
        if self.refusals:
            self.refusals -= 1
            msg = "the database system is starting up"
            raise sqlite3.OperationalError(msg)
        super().prepare()

    def is_lost(self, error: Exception) -> bool:
        return "starting up" in str(error)


async def test_a_database_that_is_starting_is_retried(tmp_path: Path) -> None:
    """Server and database may be started at the same time."""
    async with Database(_Starting(tmp_path / "tugline.db")) as database:
        assert await database.write(_add("first")) == "first"


def _end_connections(url: str, which: str = "") -> None:
    with psycopg.connect(url, autocommit=True) as admin:
        ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        admin.execute(f"{ours} WHERE application_name = 'tugline'{which}")


async def test_a_lost_connection_is_reopened(postgres_url: str) -> None:
    """Reads and writes go on after PostgreSQL ended all connections."""
    async with open_database(postgres_url) as database:
        await database.write(_add("before"))
        await database.read(_names)
        _end_connections(postgres_url)
        reading = asyncio.gather(*(database.read(_names) for _ in range(4)))
        await database.write(_add("later"))
        assert all("before" in names for names in await reading)
        assert await database.read(_names) == ["before", "later"]


async def test_an_operation_is_repeated_after_a_lost_connection(postgres_url: str) -> None:
    """PostgreSQL rolls the transaction back, so the operation runs again."""
    runs = []

    def op(tx: Tx) -> None:
        runs.append(1)
        _add("once")(tx)
        if len(runs) == 1:
            _end_connections(postgres_url, " AND state = 'idle in transaction'")
            tx.run("UPDATE consumers SET acked = 1")

    async with open_database(postgres_url) as database:
        await database.write(op)
        assert len(runs) == 2
        assert await database.read(_names) == ["once"]


async def test_a_full_disk_fails_writes_until_there_is_room(tmp_path: Path) -> None:
    """Writes fail with a clear error while there is no room, and work afterwards."""
    path, kept = tmp_path / "a.db", list[str]()
    async with open_database(f"sqlite:{path}") as database:

        async def fill() -> None:
            for n in range(100, 200):
                kept.append(await database.write(_add(f"{n}" + "x" * 100_000)))

        with limited_files(1_000_000), pytest.raises(StoreError, match=f"store {path}: "):
            await fill()
        await database.write(_add("later"))
        assert await database.read(_names) == [*kept, "later"]
    assert kept


def test_a_full_disk_error_has_advice(tmp_path: Path) -> None:
    """An error of a full disk, here the operating system's, advises to free some space."""
    database = open_database(f"sqlite:{tmp_path / 'a.db'}")
    error = OSError(errno.ENOSPC, "No space left on device")
    assert "free some space" in str(database._driver.explain(error))
