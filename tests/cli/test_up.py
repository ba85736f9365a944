"""``tugline up``: failed starts, and stderr that is not read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path

import pytest

from support.commands import run_command
from tugline.cli.output import background_stderr, echo


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
