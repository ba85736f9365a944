"""``tugline`` commands as processes in a folder, and an engine that needs no model."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import Program, free_ports
from support.commands import TUGLINE, run_command
from support.tokenizer import make_tokenizer

TESTS = Path(__file__).parents[1]
AGENT = TESTS / "chaos" / "agent.py"
READY_S = 40.0
DATA = "tugline-data"
EXACT = ("--tokenizer", "tokenizer.json", "--renderer", "qwen3")
"""Options for exact token ids with `World.engine`."""


class World:
    """Processes that run in `folder` until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "tokenizer.json").write_text(make_tokenizer().to_json(), encoding="utf-8")

    def engine(self) -> str:
        """Start a scripted engine; returns its URL."""
        (port,) = free_ports(1)
        engine = str(TESTS / "chaos/engine.py")
        self.start("engine", sys.executable, engine, str(port), "tokenizer.json")

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        self.wait_until(listens, "engine")
        return f"http://127.0.0.1:{port}"

    def start(self, name: str, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a process whose output is appended to ``NAME.log``."""
        program = Program(name, argv, self.folder, env)
        program.start()
        self.running[name] = program.process
        return program.process

    def tugline(self, name: str, *options: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a ``tugline`` command."""
        return self.start(name, str(TUGLINE), *options, **env)

    def ask(self, *options: str, code: int = 0) -> Any:
        """Run a ``tugline`` command to its end; returns its JSON lines."""
        done = self.call(*options, "--json")
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def call(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a ``tugline`` command to its end."""
        return run_command(*options, cwd=self.folder)

    def read_data(self, name: str, key: str) -> Any:
        """A value in a JSON file of the server."""
        return json.loads((self.folder / DATA / name).read_text())[key]

    def read_log(self, name: str) -> str:
        """The output of a process so far."""
        return (self.folder / f"{name}.log").read_text()

    def wait_until(self, check: Callable[[], bool], name: str) -> None:
        """Wait until a check is true, or fail with the output of the process `name`."""
        end = time.monotonic() + READY_S
        while not check():
            assert time.monotonic() < end, f"waited {READY_S} s for {name}: {self.read_log(name)}"
            time.sleep(0.05)

    def wait_for_log(self, name: str, text: str, *, times: int = 1) -> None:
        """Wait until a process has written a text so many times."""
        self.wait_until(lambda: self.read_log(name).count(text) >= times, name)

    def end(self, name: str, sign: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        process = self.running.pop(name)
        process.send_signal(sign)
        return process.wait(20)

    def close(self) -> None:
        """Kill the processes that still run."""
        for process in self.running.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """An empty folder to start processes in."""
    with contextlib.closing(World(tmp_path)) as opened:
        yield opened


def task(name: str, *, samples: int = 2, turns: int = 1, pause_s: float = 0.0) -> dict[str, Any]:
    """A task of `turns` model calls with pauses between them."""
    return {
        "id": name,
        "instruction": json.dumps({"turns": turns, "pause_s": pause_s}),
        "harness": {"name": "shell", "options": {"command": [sys.executable, str(AGENT)]}},
        "evaluator": {"name": "session_completed"},
        "samples": samples,
        "limits": {"agent_s": 60},
    }


def write(path: Path, tasks: Sequence[dict[str, Any]]) -> str:
    """Write a task file; returns its path."""
    path.write_text("".join(json.dumps(each) + "\n" for each in tasks))
    return str(path)
