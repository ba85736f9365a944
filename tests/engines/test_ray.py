"""``--cluster ray`` on a real Ray, with PostgreSQL: machines are added, drained and lost."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil
import pytest

from chaos.audit import list_all
from chaos.fleet import Fleet, Program, free_ports, make_task, until
from chaos.postgres import postgres
from engines.servers import ROOT, installed

TASKS, SAMPLES, LEASE_S = 100, 4, 5.0
END_S = 240.0
NOTHING: Mapping[str, str] = MappingProxyType({})
LOSS = ("n2 is gone", "n2: The actor died")
"""Log messages about the killed machine, of which the first detected is logged."""
pytestmark = [pytest.mark.engines, pytest.mark.nightly, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with Tugline and Ray, as ``pip install 'tugline[ray]'`` makes it.

    It sees our packages, and behind them those of verl's environment, which has Ray.
    """
    home = tmp_path_factory.mktemp("ray") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    verl = next((installed("verl") / "lib").glob("python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (packages / "seen.pth").write_text(f"{ROOT / 'src'}\n{ours}\n{verl}\n")
    return home / "bin" / "python"


@dataclass
class Machines:
    """The cluster, in a process of its own."""

    python: Path
    folder: Path
    address: str = field(init=False)

    def start(self, program: str, *arguments: str, **more: str) -> Self:
        """Start the cluster by a program in this folder."""
        script = Path(__file__).parent / "parts" / program
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1"}
        with (self.folder / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.python, script, *arguments],
                env={**env, **more}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, start_new_session=True, cwd=self.folder,
            )  # fmt: skip
        self.address = self._read()
        return self

    def do(self, what: str, name: str) -> None:
        """Add, kill or drain a machine, or another command of the program."""
        assert self.ask(f"{what} {name}") == self.address

    def ask(self, line: str) -> str:
        """Return the program's answer."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Stop the program and the cluster."""
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        stop = [installed("verl") / "bin" / "ray", "stop", "--force"]
        subprocess.run(stop, check=False, capture_output=True, timeout=60)

    def _read(self) -> str:
        for line in self._process.stdout:
            if line.startswith("at "):
                return line.removeprefix("at ").strip()
        pytest.fail("the cluster ended; see ray.log")


@pytest.fixture
def machines(tmp_path: Path, python: Path) -> Iterator[Callable[[int], Machines]]:
    """Starts a cluster of so many machines; it may be called again after a loss."""
    with contextlib.ExitStack() as stack:

        def start(count: int) -> Machines:
            cluster = stack.enter_context(contextlib.closing(Machines(python, tmp_path)))
            names = [f"n{number + 1}" for number in range(count)]  # the head is another machine
            return cluster.start("ray_machines.py", *names)

        yield start


@pytest.fixture
def store() -> Iterator[str]:
    """The URL of a PostgreSQL."""
    with postgres() as running:
        yield running.url


@pytest.fixture
def fleet(tmp_path: Path, store: str) -> Iterator[Fleet]:
    """Server, on PostgreSQL, and engine."""
    with contextlib.closing(Fleet(tmp_path / "run", store, lease_s=LEASE_S)) as fleet:
        fleet.launch(nodes=0)
        yield fleet


def settings(fleet: Fleet, address: str, **ray: object) -> dict[str, Any]:
    """Tables of a file for nodes on the cluster; engines are actors, or a URL if `max` is given."""
    machines = {"address": address, "folder": str(fleet.folder / "machines")}
    engine = {"tokenizer": str(fleet.folder / "tokenizer.json"), "renderer": "qwen3"}
    if "max" in ray:
        engine["urls"] = [f"http://127.0.0.1:{fleet.ports['engine']}"]  # type: ignore[assignment]
    else:
        machines["engine_actors"] = "vllm_server_"
    return {"ray": {**machines, **ray}, "engine": engine, "node": {"slots": 4}}


def place_nodes(
    fleet: Fleet, python: Path, address: str, *, env: Mapping[str, str] = NOTHING, **ray: object
) -> Program:
    """Start the program that places a node on each machine, for a server that runs already."""
    file = fleet.folder / "ray.json"
    file.write_text(json.dumps(settings(fleet, address, **ray)))
    program = fleet.add(
        "nodes-of-ray", str(python), "-m", "tugline.cli.app", "node", "--cluster", "ray",
        "--server", fleet.url, "--config", str(file),
        TUGLINE_JOIN_TOKEN=fleet.tokens["join"], TUGLINE_TOKEN=fleet.tokens["read"],
        RAY_USAGE_STATS_ENABLED="0", **env,
    )  # fmt: skip
    program.start()
    return program


def submit(fleet: Fleet, tasks: int) -> None:
    """Tasks whose agents make three model calls each."""
    fleet.api().post("/v1/tasks", [make_task(f"t{n}", 3, 0.2) for n in range(tasks)])


def nodes(fleet: Fleet) -> dict[str, str]:
    """State of each node that the server knows, by machine."""
    return {one["name"]: one["state"] for one in fleet.api().get("/v1/nodes")}


def done(fleet: Fleet) -> int:
    """Sessions with a result."""
    sessions: dict[str, int] = fleet.api().get("/v1/status")["sessions"]
    return sessions.get("completed", 0)


def events(fleet: Fleet) -> list[Mapping[str, Any]]:
    """All events of the server."""
    return list(list_all(fleet.api(), "/v1/events", "position"))


def check_results(fleet: Fleet, count: int) -> None:
    """So many sessions have ended, each committed once."""
    results = Counter(one["session"] for one in events(fleet) if one["kind"] == "session.result")
    assert len(results) == count
    assert set(results.values()) == {1}


def test_sessions_survive_the_loss_of_machines_and_processes(
    machines: Callable[[int], Machines], python: Path, store: str, tmp_path: Path
) -> None:
    """400 sessions end, each committed once, with the engine that an actor of the cluster names.

    All are started by ``tugline up --cluster ray``. Meanwhile one of four machines is killed, one
    drained, one added, the server is killed with SIGKILL, and later the placer of nodes.
    """
    began, ray = time.time(), machines(4)
    fleet = Fleet(
        tmp_path / "run", store, lease_s=LEASE_S, cli=(str(python), "-m", "tugline.cli.app"),
        up=("--cluster", "ray"),
    )  # fmt: skip
    with contextlib.closing(fleet):
        fleet.add_settings("server.yaml", settings(fleet, ray.address))
        fleet.launch(nodes=0)
        run_all(fleet, ray, began)


def run_all(fleet: Fleet, ray: Machines, began: float) -> None:
    """The steps of the test above, with all started."""
    log_file = fleet.folder / "server.log"
    until(lambda: "no node on" in log_file.read_text(), "the lack of an engine", 60)
    ray.do("engine", str(fleet.ports["engine"]))
    until(lambda: list(nodes(fleet).values()) == ["live"] * 4, "four nodes", 90)
    joined = time.time() - began
    submit(fleet, TASKS)
    until(lambda: done(fleet) > 20, "the first sessions", END_S)
    ray.do("kill", "n2")
    lost_at = time.time()
    until(lambda: done(fleet) > 80, "sessions beside the loss", END_S)
    ray.do("add", "n5")
    ray.do("drain", "n3")
    until(lambda: nodes(fleet).get("n5") == "live", "the new machine's node", 60)
    until(lambda: done(fleet) > 160, "sessions with it", END_S)
    until(lambda: any(loss in log_file.read_text() for loss in LOSS), "Ray to see the loss", 60)
    fleet.programs["server"].kill()
    fleet.supervise()
    until(lambda: done(fleet) > 240, "sessions after the server was back", END_S)
    server = fleet.programs["server"].process
    next(iter(psutil.Process(server.pid).children())).kill()
    until(lambda: "restarting it" in log_file.read_text(), "the end of the placer")
    until(lambda: done(fleet) == TASKS * SAMPLES, "every session", END_S)
    again = [one["created"] for one in events(fleet) if one["kind"] == "session.requeued"]
    check_results(fleet, TASKS * SAMPLES)
    assert {name for name, state in nodes(fleet).items() if state == "live"} == {"n1", "n4", "n5"}
    log = log_file.read_text()
    assert "n3 is drained" in log
    assert log.count("runs a node") >= 5
    server.terminate()
    assert server.wait(60) == 0
    assert all(f"{name} is drained" in log_file.read_text() for name in ("n1", "n4", "n5"))
    sys.stdout.write(
        f"nodes joined after {joined:.0f} s; of the lost machine's sessions the first ran again"
        f" {min(again) - lost_at:.1f} s after its loss (lease {LEASE_S:.0f} s);"
        f" {TASKS * SAMPLES} sessions in {time.time() - began:.0f} s\n"
    )


def test_sessions_survive_the_loss_of_the_cluster(
    machines: Callable[[int], Machines], python: Path, fleet: Fleet
) -> None:
    """A lost cluster ends the node after its sessions, and a new cluster continues."""
    ray = machines(1)
    ray.do("engine", str(fleet.ports["engine"]))
    placer = place_nodes(fleet, python, ray.address)
    until(lambda: list(nodes(fleet).values()) == ["live"], "a node", 90)
    submit(fleet, 8)
    until(lambda: done(fleet) > 2, "the first sessions", END_S)
    ray.do("gcs", "restart")
    assert placer.process.wait(60) != 0
    until(lambda: "live" not in nodes(fleet).values(), "the node to end", 60)
    before = done(fleet)
    submit(fleet, 12)  # the server knows eight of them
    ray.close()
    ray = machines(1)
    ray.do("engine", str(fleet.ports["engine"]))
    place_nodes(fleet, python, ray.address)
    until(lambda: done(fleet) == 12 * SAMPLES, "every session", END_S)
    check_results(fleet, 12 * SAMPLES)
    assert 3 <= before < 12 * SAMPLES


def test_a_cluster_grows_with_the_queue_and_shrinks(
    tmp_path: Path, python: Path, fleet: Fleet
) -> None:
    """Ray's autoscaler adds machines while there is work, three at most, and removes them again."""
    began, port = time.time(), free_ports(1)[0]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with contextlib.closing(Machines(python, tmp_path)) as ray:
        ray.start("ray_autoscaled.py", str(port), **token)
        place_nodes(fleet, python, ray.address, env=token, max=3, idle_s=3)
        assert ray.ask("which") == ""
        submit(fleet, 10)
        until(lambda: ray.ask("which") == "m1,m2,m3", "three machines", 120)
        grown = time.time() - began
        until(lambda: list(nodes(fleet).values()) == ["live"] * 3, "their nodes", 90)
        until(lambda: done(fleet) == 10 * SAMPLES, "every session", END_S)
        until(lambda: "live" not in nodes(fleet).values(), "the nodes to be drained", 60)
        until(lambda: ray.ask("which") == "", "the machines to be removed", 120)
        check_results(fleet, 10 * SAMPLES)
        sys.stdout.write(f"grown after {grown:.0f} s, empty after {time.time() - began:.0f} s\n")
