"""``tugline`` as people start it: processes in a folder, and an engine that needs no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import free_ports
from commands import TUGLINE, run_command
from tiny import tokenizer

TESTS = Path(__file__).parents[1]
AGENT = TESTS / "chaos" / "agent.py"
READY_S = 40.0
DATA = "tugline-data"
EXACT = ("--tokenizer", "tokenizer.json", "--renderer", "qwen3")
"""Options of a node that renders for `World.engine`."""


class World:
    """Processes that work in `folder`; all are ended by `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "tokenizer.json").write_text(tokenizer().to_json(), encoding="utf-8")

    def engine(self) -> str:
        """Start one; its URL."""
        (port,) = free_ports(1)
        engine = str(TESTS / "chaos/engine.py")
        self.start("engine", sys.executable, engine, str(port), "tokenizer.json")

        def listens() -> bool:
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", port)) == 0

        until(listens, "the engine", lambda: self.said("engine"))
        return f"http://127.0.0.1:{port}"

    def start(self, name: str, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        """A process whose words go to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                argv,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(TESTS), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.running[name]

    def tugline(self, name: str, *options: str, **env: str) -> subprocess.Popen[bytes]:
        """A command that goes on."""
        return self.start(name, str(TUGLINE), *options, **env)

    def ask(self, *options: str, code: int = 0) -> Any:
        """A command that ends by itself; what it printed, out of its JSON lines."""
        done = self.call(*options, "--json")
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def call(self, *options: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return run_command(*options, cwd=self.folder)

    def read_data(self, name: str, key: str) -> Any:
        """A value of a JSON file of the server's."""
        return json.loads((self.folder / DATA / name).read_text())[key]

    def said(self, name: str) -> str:
        """What a process has written so far."""
        return (self.folder / f"{name}.log").read_text()

    def up(self, name: str, *arguments: str) -> None:
        """Wait until it said so."""
        until(
            lambda: all(one in self.said(name) for one in arguments), name, lambda: self.said(name)
        )

    def end(self, name: str, sign: int = signal.SIGTERM, within_s: float = 20.0) -> int:
        """Send a signal and wait; the exit code."""
        process = self.running.pop(name)
        process.send_signal(sign)
        return process.wait(within_s)

    def close(self) -> None:
        """Kill what is left."""
        for process in self.running.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A folder, and whatever is started in it."""
    made = World(tmp_path)
    yield made
    made.close()


def task(name: str, *, samples: int = 2, turns: int = 1, pause_s: float = 0.0) -> dict[str, Any]:
    """A conversation of `turns` model calls, with so long between them."""
    return {
        "id": name,
        "instruction": json.dumps({"turns": turns, "pause_s": pause_s}),
        "harness": {"name": "shell", "options": {"command": [sys.executable, str(AGENT)]}},
        "evaluator": {"name": "session_completed"},
        "samples": samples,
        "limits": {"agent_s": 60},
    }


def write(path: Path, tasks: Sequence[dict[str, Any]]) -> str:
    """A task file."""
    path.write_text("".join(json.dumps(one) + "\n" for one in tasks))
    return str(path)


def until(
    done: Callable[[], bool], what: str, log: Callable[[], str], within_s: float = READY_S
) -> None:
    """Wait for it, or fail with its log."""
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, f"waited {within_s} s for {what}: {log()}"
        time.sleep(0.05)
