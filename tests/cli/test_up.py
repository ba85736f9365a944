"""``tugline up``: failed starts, and stderr that is not read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.fleet import until
from support.commands import TUGLINE, run_command
from tugline.cli.output import background_stderr, echo
from tugline.launch.naming import name_run
from tugline.launch.server import open_control_plane
from tugline.protocol import RunKind, RunStart
from tugline.server.settings import ServerSettings
from tugline.server.store import runs


def test_a_failed_start_leaves_no_address(tmp_path: Path) -> None:
    """Clients of the folder learn that there is no server, not that it is down."""
    done = run_command("up", "--model", "nowhere", "--port", "0", cwd=tmp_path)
    assert (done.returncode, "the server is up" in done.stderr) == (2, True)
    assert "nowhere is not a folder; give a model folder" in done.stderr
    assert not (tmp_path / "tugline-data/server.json").exists()
    assert (tmp_path / "tugline-data/tokens.json").exists()


def test_a_taken_folder_is_named(tmp_path: Path) -> None:
    """The error names the folder that another process uses."""
    (tmp_path / "tugline-data").mkdir()
    with (tmp_path / "tugline-data/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_command("up", "--no-node", "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "another process is running in tugline-data" in done.stderr


def test_runs_of_a_folder_are_served_together(tmp_path: Path) -> None:
    """Their data is copied and removed; nothing is written into the folders of the runs."""
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    name = name_run(folder)
    asyncio.run(register(folder, name))
    blob = tmp_path / "blobs" / "aa" / "of-another-server"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"data")
    os.utime(blob, (0, 0))
    (tmp_path / "settings.yaml").write_text("server: {blobs: blobs, keep_tasks_days: 0.001}\n")
    before = sorted(path.name for path in folder.iterdir())
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [TUGLINE, "up", "--dir", "runs", "--port", "0", "--config", "settings.yaml"],
            cwd=tmp_path,
            stdout=out,
            stderr=out,
        )
    try:
        link = re.compile(r"the console is at (\S+)/runs#token=(\S+)\n")
        until(lambda: link.search(log.read_text()) or server.poll() is not None, "the console")
        text = log.read_text()
        assert "reading 1 run of runs" in text
        assert "join a node" not in text
        url, token = link.findall(text)[0]
        listed = run_command("runs", "--server", url, "--json", env={"TUGLINE_TOKEN": token})
        assert [run["name"] for run in json.loads(listed.stdout)] == [name]
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    assert sorted(path.name for path in folder.iterdir()) == before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first"]
    assert blob.exists()
    done = run_command("up", "--dir", "runs", "--nodes", "2", "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "runs has runs, whose console is served without nodes: omit --nodes" in done.stderr


async def register(folder: Path, name: str) -> None:
    """Store a run that has ended in its folder."""
    async with open_control_plane(ServerSettings(), folder) as control:
        await control.database.write(runs.start, name, RunStart(kind=RunKind.TRAIN))
        await control.database.write(runs.end, name)


def test_unread_stderr_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command continues and ends while its output is not read; what fits can be read later."""
    read, write = os.pipe()
    broken = contextlib.suppress(BrokenPipeError)  # what is not read by then is lost
    with broken, os.fdopen(write, "w") as stderr, os.fdopen(read) as reader:
        monkeypatch.setattr("sys.stderr", stderr)
        with background_stderr(within_s=0.1):
            for number in range(3000):  # some 300 kB; a pipe takes 64
                echo(f"line {number} " + "x" * 90)
        assert sys.stderr is stderr
        first = [reader.readline().split()[:2] for _ in range(300)]
    assert first == [["line", str(number)] for number in range(300)]
