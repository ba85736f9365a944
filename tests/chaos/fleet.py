"""All programs of a run, as processes that can be killed and are started again.

A program that ends is started again at once, as by a supervisor; unexpected exits are collected.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from chaos.wire import Api
from support.tokenizer import make_tokenizer

HERE = Path(__file__).parent
GROUP = 4
TUGLINE = str(Path(sys.executable).with_name("tugline"))
READY_S = 60.0
LEASE_S = 3.0
_SEARCH_PATH = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))


@dataclass
class Program:
    """A process and its command."""

    name: str
    argv: tuple[str, ...]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    back: float | None = None
    """Time of the next start; None while it runs."""
    frozen: float | None = None
    """Time until which it is stopped."""

    def start(self) -> None:
        """Start the process; its output is appended to a file in its folder."""
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": _SEARCH_PATH, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.back = None

    @property
    def alive(self) -> bool:
        """Whether the process exists, stopped or not."""
        return self.process is not None and self.process.poll() is None

    def kill(self, back_in_s: float = 0.0) -> None:
        """SIGKILL; `Fleet.supervise` starts it again after `back_in_s`."""
        self.back = time.time() + back_in_s
        self.process.kill()
        self.process.wait(10)
        self.frozen = None

    def freeze(self, for_s: float) -> None:
        """SIGSTOP; `Fleet.supervise` lets it continue after `for_s`."""
        self.process.send_signal(signal.SIGSTOP)
        self.frozen = time.time() + for_s

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = None
        self.process.send_signal(signal.SIGCONT)


@dataclass
class Outage:
    """A time without a server."""

    down: float
    started: float
    ready: float = 0.0

    @property
    def recovery_s(self) -> float:
        """Seconds from the start of the process to its first successful response."""
        return self.ready - self.started


class Fleet:
    """Server, two nodes, engine, receiver and trainer of one run, in `folder`."""

    def __init__(
        self,
        folder: Path,
        store: str | None = None,
        *,
        lease_s: float = LEASE_S,
        slots: int = 6,
        engine: Mapping[str, object] = MappingProxyType({}),
        cli: Sequence[str] = (TUGLINE,),
        up: Sequence[str] = ("--no-node",),
    ) -> None:
        """`store` is the URL of another store than the server's own.

        `engine` has further engine settings; the server's command line begins with `cli` and has
        the options `up`.
        """
        self.folder, self.lease_s, self.cli, self.up = folder, lease_s, cli, up
        self.ports = dict(zip(("server", "engine", "receiver"), free_ports(3), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['server']}"
        self.callback = f"http://127.0.0.1:{self.ports['receiver']}/done"
        self.programs: dict[str, Program] = {}
        self.outages: list[Outage] = []
        self.unexpected_exits: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(make_tokenizer().to_json(), encoding="utf-8")
        server = {
            "lease_s": lease_s,
            "callback_hosts": ["127.0.0.1"],
            **({"store": store} if store else {}),
        }
        self._write("server.yaml", {"server": server})
        rendering = {"tokenizer": "tokenizer.json", "renderer": "qwen3", **engine}
        self._write("node.yaml", {"engine": rendering, "node": {"slots": slots}})

    def add_settings(self, name: str, tables: Mapping[str, object]) -> None:
        """Add tables to a file of settings."""
        self._write(name, {**json.loads((self.folder / name).read_text()), **tables})

    def _write(self, name: str, values: object) -> None:
        (self.folder / name).write_text(json.dumps(values), encoding="utf-8")

    def add(self, name: str, *argv: str, **env: str) -> Program:
        """Add a program to this run without starting it."""
        if name != "server":  # whose recovery is measured
            argv = ("nice", "-n", "10", *argv)
        self.programs[name] = Program(name, argv, self.folder, env)
        return self.programs[name]

    def launch(self, nodes: int = 2) -> None:
        """Start all programs in order."""
        python = (sys.executable,)
        self.add("engine", *python, str(HERE / "engine.py"), str(self.ports["engine"]),
                 "tokenizer.json").start()  # fmt: skip
        self.add("receiver", *python, str(HERE / "receiver.py"), str(self.ports["receiver"]),
                 "delivered.jsonl").start()  # fmt: skip
        self.launch_server()
        for number in range(nodes):
            self.add_node(f"node{number}").start()
        self.add("trainer", *python, str(HERE / "trainer.py"), self.url, self.tokens["client"],
                 "trained.jsonl").start()  # fmt: skip

    def launch_server(self) -> None:
        """Start the server for the first time."""
        self.add("server", *self.cli, "up", *self.up, "--config", "server.yaml",
                 "--dir", "server", "--port", str(self.ports["server"]))  # fmt: skip
        self.start_server(time.time())
        until(lambda: bool(self.outages[0].ready), "the server to answer")

    def add_node(self, name: str) -> Program:
        """Add a node without starting it."""
        engine = f"http://127.0.0.1:{self.ports['engine']}"
        return self.add(name, TUGLINE, "node", "--server", self.url, "--config", "node.yaml",
                        "--dir", name, "--name", name, "--engine", engine,
                        TUGLINE_JOIN_TOKEN=self.tokens["join"])  # fmt: skip

    @property
    def tokens(self) -> dict[str, str]:
        """The server's tokens."""
        return json.loads((self.folder / "server" / "tokens.json").read_text())

    @property
    def nodes(self) -> list[Program]:
        """The programs that are nodes."""
        return [each for name, each in self.programs.items() if name.startswith("node")]

    def api(self, within_s: float = 60.0) -> Api:
        """A client of the server."""
        return Api(self.url, self.tokens["client"], within_s=within_s)

    def start_server(self, down: float) -> None:
        """Start the server and measure the time until it responds."""
        outage = Outage(down, time.time())
        self.outages.append(outage)
        self.programs["server"].start()
        threading.Thread(target=self._measure, args=(outage,), daemon=True).start()

    def _measure(self, outage: Outage) -> None:
        until = time.time() + READY_S
        while time.time() < until and self.outages[-1] is outage:
            try:
                status, _ = Api(self.url, self.tokens["client"]).once(
                    "GET", "/v1/status", timeout_s=2.0
                )
            except (OSError, HTTPException):
                status = 0
            if status == 200:
                outage.ready = time.time()
                return
            time.sleep(0.01)

    def supervise(self) -> None:
        """Start programs that are due again, and continue those that were stopped long enough."""
        now = time.time()
        for name, program in self.programs.items():
            if program.back is None and not program.alive:
                code = program.process.returncode if program.process else None
                self.unexpected_exits.append(f"{name} ended by itself with code {code}")
                program.back = now
            if program.back is not None and program.back <= now:
                if name == "server":
                    self.start_server(program.back)
                else:
                    program.start()
            if program.frozen is not None and program.frozen <= now:
                program.thaw()

    def agents(self) -> list[int]:
        """Processes of the fake agents that work in this run's folders."""
        return [
            process.pid
            for process in psutil.process_iter(["cmdline", "cwd"])
            if any(argument.endswith("agent.py") for argument in process.info["cmdline"] or ())
            and self.folder in Path(process.info["cwd"] or "/").parents
        ]

    def close(self) -> None:
        """End everything, agents included."""
        for program in self.programs.values():
            if program.alive:
                program.kill()
        for pid in self.agents():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports on which no program listens."""
    with contextlib.ExitStack() as stack:
        local = ("127.0.0.1", 0)
        sockets = [stack.enter_context(socket.create_server(local)) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def make_task(name: str, turns: int, pause_s: float) -> dict[str, Any]:
    """A group of agents with `turns` model calls each, in sandboxes, without tests."""
    return {
        "id": name,
        "instruction": json.dumps({"turns": turns, "pause_s": pause_s}),
        "harness": {"name": "shell", "options": {"command": ["python3", "agent.py"]}},
        "evaluator": {"name": "session_completed"},
        "runtime": {"name": "bubblewrap"},
        "files": {"agent.py": (HERE / "agent.py").read_text()},
        "samples": GROUP,
        "group": {"attempts": 10},
    }


def until(done: Callable[[], object], what: str, within_s: float = READY_S) -> None:
    """Wait until `done` is true, or raise `TimeoutError` with `what`."""
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            msg = f"waited {within_s} s for {what}"
            raise TimeoutError(msg)
        time.sleep(0.05)
