"""Everything that takes part in a run, as processes that can be killed and started again.

Nothing here waits for a process to end well: whoever dies is started again at once, as a
supervisor would, and a death that nobody ordered is written down.
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
from tiny import tokenizer

HERE = Path(__file__).parent
TUGLINE = str(Path(sys.executable).with_name("tugline"))
READY_S = 60.0
LEASE_S = 3.0


@dataclass
class Program:
    """One process, and how it is started."""

    name: str
    argv: tuple[str, ...]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    back: float | None = None
    """When it is to be started again; None while it runs."""
    frozen: float | None = None
    """Until when it is stopped."""

    def start(self) -> None:
        """Start it; what it says goes to a file beside the others'."""
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(HERE.parent), **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.back = None

    @property
    def alive(self) -> bool:
        """Whether it runs, stopped or not."""
        return self.process is not None and self.process.poll() is None

    def kill(self, back_in_s: float = 0.0) -> None:
        """SIGKILL; `Fleet.tend` starts it again after so many seconds."""
        assert self.process is not None
        self.back = time.time() + back_in_s
        self.process.kill()
        self.process.wait(10)
        self.frozen = None

    def freeze(self, for_s: float) -> None:
        """SIGSTOP; `Fleet.tend` lets it go on after so many seconds."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.frozen = time.time() + for_s

    def thaw(self) -> None:
        """SIGCONT."""
        assert self.process is not None
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
        """From the start of the process to the first good answer."""
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

        `engine` are further settings of it, `cli` begins the server's command line, and `up` are
        options of it.
        """
        self.folder, self.lease_s, self.cli, self.up = folder, lease_s, cli, up
        self.ports = dict(zip(("server", "engine", "receiver"), free_ports(3), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['server']}"
        self.callback = f"http://127.0.0.1:{self.ports['receiver']}/done"
        self.programs: dict[str, Program] = {}
        self.outages: list[Outage] = []
        self.deserters: list[str] = []
        """Who died without being killed."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer().to_json(), encoding="utf-8")
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
        """A program of this run; it is not started yet."""
        if name != "server":  # which has a machine of its own in life, and a time to keep here
            argv = ("nice", "-n", "10", *argv)
        self.programs[name] = Program(name, argv, self.folder, env)
        return self.programs[name]

    def launch(self, nodes: int = 2) -> None:
        """Start all, in their order."""
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
        """Start it for the first time."""
        self.add("server", *self.cli, "up", *self.up, "--config", "server.yaml",
                 "--dir", "server", "--port", str(self.ports["server"]))  # fmt: skip
        self.start_server(time.time())
        until(lambda: bool(self.outages[0].ready), "the server to answer")

    def add_node(self, name: str) -> Program:
        """A node with this name; it is not started yet."""
        engine = f"http://127.0.0.1:{self.ports['engine']}"
        return self.add(name, TUGLINE, "node", "--server", self.url, "--config", "node.yaml",
                        "--dir", name, "--name", name, "--engine", engine,
                        TUGLINE_JOIN_TOKEN=self.tokens["join"])  # fmt: skip

    @property
    def tokens(self) -> dict[str, str]:
        """Those that the server made when it was started first."""
        return json.loads((self.folder / "server" / "tokens.json").read_text())

    @property
    def nodes(self) -> list[Program]:
        """The nodes."""
        return [one for name, one in self.programs.items() if name.startswith("node")]

    def api(self, within_s: float = 60.0) -> Api:
        """The server, as a client."""
        return Api(self.url, self.tokens["client"], within_s=within_s)

    def start_server(self, down: float) -> None:
        """Start the server and take the time until it answers."""
        outage = Outage(down, time.time())
        self.outages.append(outage)
        self.programs["server"].start()
        threading.Thread(target=self._time, args=(outage,), daemon=True).start()

    def _time(self, outage: Outage) -> None:
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

    def tend(self) -> None:
        """Start again who is due, let go on who was stopped long enough."""
        now = time.time()
        for name, one in self.programs.items():
            if one.back is None and not one.alive:
                code = one.process.returncode if one.process else None
                self.deserters.append(f"{name} ended by itself with code {code}")
                one.back = now
            if one.back is not None and one.back <= now:
                if name == "server":
                    self.start_server(one.back)
                else:
                    one.start()
            if one.frozen is not None and one.frozen <= now:
                one.thaw()

    def agents(self) -> list[int]:
        """Processes of the fake agents that work in this run's folders."""
        return [
            one.pid
            for one in psutil.process_iter(["cmdline", "cwd"])
            if any(word.endswith("agent.py") for word in one.info["cmdline"] or ())
            and self.folder in Path(one.info["cwd"] or "/").parents
        ]

    def close(self) -> None:
        """End everything, agents included."""
        for one in self.programs.values():
            if one.alive:
                one.kill()
        for pid in self.agents():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at."""
    with contextlib.ExitStack() as stack:
        local = ("127.0.0.1", 0)
        sockets = [stack.enter_context(socket.create_server(local)) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def make_task(name: str, turns: int, pause_s: float) -> dict[str, Any]:
    """A group of four agents of so many turns, shut in, whom nobody judges."""
    return {
        "id": name,
        "instruction": json.dumps({"turns": turns, "pause_s": pause_s}),
        "harness": {"name": "shell", "options": {"command": ["python3", "agent.py"]}},
        "evaluator": {"name": "session_completed"},
        "runtime": {"name": "bubblewrap"},
        "files": {"agent.py": (HERE / "agent.py").read_text()},
        "samples": 4,
        "group": {"attempts": 10},
    }


def until(done: Callable[[], object], what: str, within_s: float = READY_S) -> None:
    """Wait for it, or raise `TimeoutError` that says for what."""
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            msg = f"waited {within_s} s for {what}"
            raise TimeoutError(msg)
        time.sleep(0.05)
