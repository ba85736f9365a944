"""``tugline up``, ``node`` and ``run``: what is wrong is one line that says what would be right."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import run_command
from launch.processes import World, task, write
from tugline.cli.app import main
from tugline.cli.output import background_stderr
from tugline.cli.up import echo
from tugline.recording.trajectories import read_folder


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A folder, and whatever is started in it."""
    made = World(tmp_path)
    yield made
    made.close()


def tugline(*options: str, cwd: Path) -> tuple[int, str]:
    """Exit code and stderr as one line; stdout stays empty and there is no traceback."""
    done = run_command(*options, cwd=cwd)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ("up", "--engine", "http://x", "--config", "both.yaml"),
            "beside engine.urls give served_",
        ),
        (("up", "--model", "m", "--tokenizer", "t"), "--tokenizer is for an engine at an address"),
        (("up", "--port", "70000"), "server.port is 70000, must be an integer <= 65535"),
        (("up", "--slots", "0"), "node.slots is 0, must be an integer >= 1"),
        (("up", "--name", "a/b"), "node.name is 'a/b', must be a string matching"),
        (("up", "--config", "wrong.yaml"), "wrong.yaml: unknown key 'server.prot'; did you mean"),
        (("run", "none.yaml", "--out", "o"), "there is no file none.yaml"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_is_one_clear_line(
    tmp_path: Path,
    options: tuple[str, ...],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Flags and files, before anything is started."""
    (tmp_path / "wrong.yaml").write_text("server: {prot: 3}\n")
    (tmp_path / "both.yaml").write_text("engine: {model: m}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tugline", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert line in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("up", "--store", "mysql://x", "--no-node"), "must be sqlite:PATH or postgresql://"),
        (("up", "--model", "nowhere", "--port", "0"), "no model folder at nowhere"),
        (("node", "--server", "127.0.0.1", "--token", "t"), "must be a URL such as http://"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_used_ends_the_start(
    tmp_path: Path, options: tuple[str, ...], line: str
) -> None:
    """A store, a model and a server, each one clear line."""
    code, output = tugline(*options, cwd=tmp_path)
    assert code == 2, output
    assert line in output


def test_a_taken_port_and_a_taken_folder_are_named(tmp_path: Path) -> None:
    """Somebody else has them."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, output = tugline("up", "--no-node", "--port", str(port), cwd=tmp_path)
    assert (code, f"cannot listen on 127.0.0.1:{port}" in output) == (2, True)
    with (tmp_path / "tugline-data/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output = tugline("up", "--no-node", "--port", "0", cwd=tmp_path)
    assert (code, "another process is running in tugline-data" in output) == (2, True)


def test_a_failed_start_leaves_no_address(tmp_path: Path) -> None:
    """Clients of the folder are told that there is no server, not that it is down."""
    code, output = tugline("up", "--model", "nowhere", "--port", "0", cwd=tmp_path)
    assert (code, "the server is up" in output) == (2, True)
    assert not (tmp_path / "tugline-data/server.json").exists()
    assert (tmp_path / "tugline-data/tokens.json").exists()


def test_run_leaves_files_and_goes_on(world: World) -> None:
    """Results as lines and trajectories; the same command with one more task runs only that."""
    exact = ("--engine", world.engine(), "--tokenizer", "tokenizer.json", "--renderer", "qwen3")
    run = ("run", "tasks.jsonl", "--out", "o", *exact)
    write(world.folder / "tasks.jsonl", [task("a")])
    (first,) = world.ask(*run)
    assert (first["sessions"], first["reward"], first["failures"]) == (2, 1.0, {})
    write(world.folder / "tasks.jsonl", [task("a"), task("b", samples=1)])
    (second,) = world.ask(*run)
    assert second["sessions"] == 3
    lines = (world.folder / "o/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines][2] == "b-0"
    kept = list(read_folder(world.folder / "o/trajectories"))
    assert sorted(one.session for one in kept) == ["a-0", "a-1", "b-0"]
    changed = task("a") | {"samples": 5}
    write(world.folder / "tasks.jsonl", [changed])
    refused = world.call(*run)
    assert (refused.returncode, "'a'" in refused.stderr) == (2, True), refused.stderr


def test_run_says_that_nothing_got_through(world: World) -> None:
    """Exit code 1, and the agent's last words."""
    broken = task("a") | {
        "harness": {"name": "shell", "options": {"command": "echo oh no; exit 3"}}
    }
    write(world.folder / "tasks.jsonl", [broken])
    exact = ("--engine", world.engine(), "--tokenizer", "tokenizer.json", "--renderer", "qwen3")
    done = world.call("run", "tasks.jsonl", "--out", "o", *exact)
    assert done.returncode == 1, done.stderr
    assert "2 failed in the harness" in done.stderr
    assert "oh no" in done.stderr


def test_a_stopped_terminal_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command goes on while nobody reads what it prints, and ends; what fits is there later."""
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
