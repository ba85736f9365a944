"""``tugline server check`` and ``tugline server backup``."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from recording.verify.recorded import work
from support.commands import run_command
from support.server import RunningServer, damage_results, flip_bit, serve


async def check(folder: Path, *options: object) -> tuple[int, Any]:
    """Exit code and report of a check of the server in `folder`."""
    command = ("server", "check", "--dir", folder, "--json", *options)
    done = await asyncio.to_thread(run_command, *command)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def serve_in(folder: Path) -> AbstractAsyncContextManager[RunningServer]:
    """A server with the store that `tugline server` uses by default in its folder."""
    return serve(f"sqlite:{folder / 'server.db'}", folder)


async def test_damaged_and_lost_results_are_named(store_url: str, tmp_path: Path) -> None:
    """Both stores are checked while the server runs and after it was stopped.

    It is one scenario, since the same damage is looked for in three ways.
    """
    store = ("--store", store_url)
    async with serve(store_url, tmp_path) as server:
        await server.finish(samples=4)
        await server.submit(id="u")
        await server.ask("POST", "/v1/tasks/u/cancel")
        sound = await check(tmp_path, *store)
        assert sound == (0, {"results": 4, "recordings": 0, "damaged": {}})
        name = damage_results(tmp_path, "t-1", "t-3")
        code, running = await check(tmp_path, *store)
        assert (code, running["results"]) == (1, 4)
        assert list(running["damaged"]) == ["t-1", "t-3"]
        assert f"blob {name!r} does not have the SHA-256" in running["damaged"]["t-1"]
        assert "unknown blob 't-3." in running["damaged"]["t-3"]
    assert await check(tmp_path, *store) == (1, running)
    output = run_command("server", "check", "--dir", tmp_path, *store)
    assert output.returncode == 1
    *damaged, last = output.stdout.splitlines()
    assert [line.partition(":")[0] for line in damaged] == ["t-1", "t-3"]
    assert last == "4 results and 0 recordings were read; 2 are damaged or missing"


def test_a_missing_database_is_an_error(tmp_path: Path) -> None:
    """A missing database is not created."""
    code, output = asyncio.run(check(tmp_path))
    assert (code, "unable to open" in output, list(tmp_path.iterdir())) == (1, True, [])


async def test_a_damaged_database_is_an_error(tmp_path: Path) -> None:
    """The message names the file."""
    async with serve_in(tmp_path) as server:
        await server.finish(samples=40)
    assert (await check(tmp_path))[0] == 0
    file = tmp_path / "server.db"
    with file.open("r+b") as data:
        data.seek(4096)
        data.write(b"\x5a" * (file.stat().st_size - 4096))
    code, output = await check(tmp_path)
    assert (code, "server.db" in output) == (1, True), output


async def test_recordings_are_checked(tmp_path: Path) -> None:
    """The recordings in the given folders are checked, too."""
    await work(tmp_path / "node")
    (path,) = (tmp_path / "node").glob("*.rec")
    async with serve_in(tmp_path):
        pass
    command = (tmp_path, "--recordings", tmp_path / "node")
    assert await check(*command) == (0, {"results": 0, "recordings": 1, "damaged": {}})
    flip_bit(path)
    code, report = await check(*command)
    assert (code, report["recordings"], list(report["damaged"])) == (1, 1, [path.name])


async def test_a_server_starts_from_a_backup(tmp_path: Path) -> None:
    """A backup of a running server has its results and tokens, and no later ones."""
    folder, copy = tmp_path / "server", tmp_path / "backups" / "first"
    folder.mkdir()
    async with serve_in(folder) as server:
        (folder / "tokens.json").write_text("{}")
        await server.finish(samples=4)
        made = await asyncio.to_thread(run_command, "server", "backup", copy, "--dir", folder)
        assert (made.returncode, made.stderr) == (0, "")
        await server.finish(id="later")
    assert (await check(folder))[1]["results"] > 4
    assert await check(copy) == (0, {"results": 4, "recordings": 0, "damaged": {}})
    assert (copy / "tokens.json").read_text() == "{}"
    assert (copy / "server.db").stat().st_mode & 0o777 == 0o600
    async with serve_in(copy) as restored:
        await restored.finish(id="from-there")
    assert (await check(copy))[1]["results"] > 4


def test_a_backup_needs_a_store_and_a_new_folder(tmp_path: Path) -> None:
    """Nothing is overwritten, and no folder is left behind."""

    def refuse(copy: Path, code: int) -> str:
        done = run_command("server", "backup", copy, "--dir", tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)
        return done.stderr

    assert "has no server.db" in refuse(tmp_path / "copy", 2)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "server.db").write_bytes(b"no database" * 1000)
    refuse(tmp_path / "copy", 1)
    assert "choose a new folder" in refuse(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["server.db"]
