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

from leased import Earlier, limited_files
from tugline.errors import Missing, StoreError, UsageError
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
    """What queues up while the disk is busy is one transaction; each caller gets its own answer."""
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


async def test_an_error_is_its_callers_alone(database: Database) -> None:
    """An operation that fails leaves nothing behind and does not touch those beside it."""
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
    """A list is answered while a transaction is open, and does not see it."""
    gate = threading.Event()

    writing = await _block(database, gate, _add("late"))
    assert await asyncio.wait_for(database.read(_names), 20) == []
    gate.set()
    await writing
    assert await database.read(_names) == ["late"]


async def _until_listening(database: Database, store_url: str) -> None:
    """Wait until it listens to other servers; once, as it begins, it rings for everybody."""
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


async def test_wakes_only_after_the_commit(database: Database, store_url: str) -> None:
    """Who is woken finds what it was woken for."""

    def op(tx: Tx) -> None:
        _add("here")(tx)
        tx.notify("topic")

    loop = asyncio.get_running_loop()
    if database.name == "postgresql":
        await _until_listening(database, store_url)
    with database.hub.subscribe("topic") as subscription:
        writing = asyncio.ensure_future(database.write(op))
        assert await subscription.wait(loop.time() + 5)
        assert await database.read(_names) == ["here"]
        await writing
    assert not database.hub.topics


async def test_a_closed_store_refuses(store_url: str) -> None:
    """Nobody waits for ever for an answer of a server that has stopped."""
    async with open_database(store_url) as database:
        pass
    for ask in (database.read, database.write):
        with pytest.raises(StoreError, match="being stopped"):
            await ask(_names)


async def test_two_servers_may_start_at_once_on_postgres(postgres_url: str) -> None:
    """One makes the tables, the other finds them."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [open_database(postgres_url) for _ in range(3)]
        await asyncio.gather(*map(stack.enter_async_context, opened))
        await opened[0].write(_add("one"))
        assert await opened[2].read(_names) == ["one"]


async def test_servers_wake_each_other_on_postgres(postgres_url: str) -> None:
    """What one server commits is heard by those who wait at another."""
    async with open_database(postgres_url) as one, open_database(postgres_url) as other:
        await _until_listening(other, postgres_url)
        with other.hub.subscribe("topic") as subscription:
            await one.write(lambda tx: tx.notify("topic", *(f"node:{n}" for n in range(2000))))
            assert await subscription.wait(asyncio.get_running_loop().time() + 5)


def _make_names(path: Path) -> list[Path]:
    """All names of a file, beside which no lock is left."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    soft, hard, folder = (path.with_name(name) for name in ("soft.db", "hard.db", "folder"))
    soft.symlink_to(path)
    hard.hardlink_to(path)
    folder.symlink_to(path.parent)
    return [path, soft, hard, folder / path.name]


async def test_a_second_server_is_refused_by_whatever_name(tmp_path: Path) -> None:
    """The lock is the file's own: no other name of it, and no deletion beside it, gets around.

    SQLite would let it in, and both would give the same nodes orders.
    """
    async with open_database(f"sqlite:{tmp_path / 'a.db'}") as database:
        for name in _make_names(tmp_path / "a.db"):
            with pytest.raises(UsageError, match=rf"{name} is used by another server"):
                async with open_database(f"sqlite:{name}"):
                    pass
        await database.write(_add("still here"))


async def test_a_damaged_file_is_no_store(tmp_path: Path) -> None:
    """The server says so before it takes any work; a page of zeros would start as empty tables."""
    path = tmp_path / "a.db"
    async with open_database(f"sqlite:{path}"):
        pass
    with path.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(4096))
    with pytest.raises(StoreError, match=r"damaged .*restore it from a backup|malformed"):
        async with open_database(f"sqlite:{path}"):
            pass


async def test_a_store_of_an_earlier_version_is_brought_up_to_date(
    store_url: str, open_earlier: Earlier
) -> None:
    """What it holds stays, with the defaults of what is new; once."""
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


async def test_a_store_of_a_later_version_is_refused(store_url: str, open_earlier: Earlier) -> None:
    """The message says which layouts there are."""
    async with open_database(store_url):
        pass
    with pytest.raises(UsageError, match=f"layout {len(STEPS)}, this version reads 3"):
        async with open_earlier(3):
            pass


@pytest.mark.parametrize("url", ["mysql://x", "sqlite:", "tugline.db"])
def test_an_unknown_store_is_refused(url: str) -> None:
    """The message says what would be right."""
    with pytest.raises(UsageError, match="must be sqlite:PATH or postgresql://"):
        open_database(url)


async def test_an_unreachable_postgres_is_said_so() -> None:
    """Without the password that the URL has."""
    with pytest.raises(StoreError, match=r"postgresql://127\.0\.0\.1:1/x") as caught:
        async with open_database("postgresql://me:secret@127.0.0.1:1/x", retry_s=0):
            pass
    assert "secret" not in str(caught.value)


class _Starting(Sqlite):
    """A database that refuses the first two connections, as PostgreSQL does while it starts."""

    refusals = 2

    def prepare(self) -> None:
        if self.refusals:
            self.refusals -= 1
            msg = "the database system is starting up"
            raise sqlite3.OperationalError(msg)
        super().prepare()

    def is_lost(self, error: Exception) -> bool:
        return "starting up" in str(error)


async def test_a_database_that_is_being_started_is_waited_for(tmp_path: Path) -> None:
    """A machine starts both at once; the server need not be started again for it."""
    async with Database(_Starting(tmp_path / "tugline.db")) as database:
        assert await database.write(_add("first")) == "first"


def _end_connections(url: str, which: str = "") -> None:
    with psycopg.connect(url, autocommit=True) as admin:
        ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        admin.execute(f"{ours} WHERE application_name = 'tugline'{which}")


async def test_a_lost_connection_is_opened_again(postgres_url: str) -> None:
    """When PostgreSQL ends all connections, writes and reads go on as if nothing was."""
    async with open_database(postgres_url) as database:
        await database.write(_add("before"))
        await database.read(_names)
        _end_connections(postgres_url)
        found = asyncio.gather(*(database.read(_names) for _ in range(4)))
        await database.write(_add("later"))
        assert all("before" in names for names in await found)
        assert await database.read(_names) == ["before", "later"]


async def test_a_connection_lost_in_the_middle_repeats_the_operation(postgres_url: str) -> None:
    """What a transaction had done is undone by the loss, and done again."""
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


async def test_a_full_disk_is_said_and_survived(tmp_path: Path) -> None:
    """Writes fail with clear words while there is no room, and go on when there is some."""
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


def test_no_space_is_explained(tmp_path: Path) -> None:
    """The operating system's own words get advice, too."""
    database = open_database(f"sqlite:{tmp_path / 'a.db'}")
    error = OSError(errno.ENOSPC, "No space left on device")
    assert "free some space" in str(database._driver.explain(error))
