"""``deploy/ray`` on a real Ray, with PostgreSQL: machines come, drain and are lost, one or all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import TUGLINE, Fleet, Program, free_ports, until
from chaos.postgres import postgres
from engines.servers import ROOT, installed

TESTS = Path(__file__).parents[1]
TASKS, SAMPLES, LEASE_S = 100, 4, 5.0
END_S = 240.0
LOSS = ("n2 is gone", "n2: The actor died")
"""What is said of the killed machine, whichever is noticed first."""
pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]


class Machines:
    """The cluster, in a process of verl's environment, which has Ray."""

    def __init__(self, folder: Path, program: str, *arguments: str, **more: str) -> None:
        script = Path(__file__).parent / "parts" / program
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_MEMORY_MONITOR": "1"}
        env |= {"PYTHONPATH": str(ROOT / "src"), **more}
        with (folder / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                [installed("verl") / "bin" / "python", script, *arguments],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True, cwd=folder,
            )  # fmt: skip
        self.address = self._read()

    def do(self, what: str, name: str) -> None:
        """Add, kill or drain a machine, or another command of the program."""
        assert self.ask(f"{what} {name}") == self.address

    def ask(self, line: str) -> str:
        """Return the program's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        stop = [installed("verl") / "bin" / "ray", "stop", "--force"]
        subprocess.run(stop, check=False, capture_output=True, timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("at "):
                return line.removeprefix("at ").strip()
        pytest.fail("the cluster ended; see ray.log")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[int], Machines]]:
    """Starts a cluster of so many machines; it may be called again when the first is lost."""
    clusters: list[Machines] = []

    def start(count: int) -> Machines:
        names = [f"n{number + 1}" for number in range(count)]  # none of them the head
        clusters.append(Machines(tmp_path, "ray_machines.py", *names))
        return clusters[-1]

    try:
        yield start
    finally:
        for cluster in clusters:
            cluster.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Server, on PostgreSQL, and engine."""
    with postgres() as store:
        fleet = Fleet(tmp_path / "run", store.url, lease_s=LEASE_S)
        try:
            fleet.launch(nodes=0)
            yield fleet
        finally:
            fleet.close()


FROM_ACTORS = ("--engine-actors", "vllm_server_")


def place_nodes(
    fleet: Fleet, address: str, *options: str, engine: str = "", **more: str
) -> Program:
    """Start the program that keeps a node on each machine."""
    script = str(ROOT / "deploy" / "ray" / "nodes.py")
    program = fleet.add(
        "nodes-of-ray", str(installed("verl") / "bin" / "python"), script,
        "--server", fleet.url, "--address", address, "--slots", "4",
        "--dir", str(fleet.folder / "machines"), "--tugline", TUGLINE, "--every-s", "0.5",
        *(options or FROM_ACTORS), "--", "--config", str(fleet.folder / "node.yaml"),
        "--tokenizer", str(fleet.folder / "tokenizer.json"), *(("--engine", engine) * bool(engine)),
        TUGLINE_JOIN_TOKEN=fleet.tokens["join"], PYTHONPATH=str(ROOT / "src"),
        RAY_USAGE_STATS_ENABLED="0", **more,
    )  # fmt: skip
    program.start()
    return program


def submit(fleet: Fleet, tasks: int) -> None:
    """Tasks whose agents make three model calls each."""
    task: dict[str, Any] = {
        "instruction": json.dumps({"turns": 3, "pause_s": 0.2}),
        "harness": {"name": "shell", "options": {"command": ["python3", "agent.py"]}},
        "evaluator": {"name": "session_completed"},
        "runtime": {"name": "bubblewrap"},
        "files": {"agent.py": (TESTS / "chaos" / "agent.py").read_text()},
        "samples": SAMPLES,
        "group": {"attempts": 10},
    }
    fleet.api().post("/v1/tasks", [{"id": f"t{n}", **task} for n in range(tasks)])


def nodes(fleet: Fleet) -> dict[str, str]:
    """State of each node that the server knows, by machine."""
    return {one["name"]: one["state"] for one in fleet.api().get("/v1/nodes")}


def done(fleet: Fleet) -> int:
    """Sessions with a result."""
    sessions: dict[str, int] = fleet.api().get("/v1/status")["sessions"]
    return sessions.get("completed", 0)


def events(fleet: Fleet) -> list[dict[str, Any]]:
    """All that the server has said."""
    found: list[dict[str, Any]] = []
    while page := fleet.api().get(
        f"/v1/events?limit=1000&after={found[-1]['position'] if found else 0}"
    ):
        found += page
    return found


def test_sessions_outlive_machines_and_their_keeper(
    machines: Callable[[int], Machines], fleet: Fleet
) -> None:
    """400 sessions end, each committed once, with the engine that an actor of the cluster names.

    Meanwhile one of four machines is killed, one drained, one added, the server is killed with
    SIGKILL, and so is the program that places nodes.
    """
    began, ray = time.time(), machines(4)
    keeper = place_nodes(fleet, ray.address)
    said = fleet.folder / "nodes-of-ray.log"
    until(lambda: "no node yet for" in said.read_text(), "the lack of an engine", 60)
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
    fleet.programs["server"].kill()
    fleet.tend()
    until(lambda: done(fleet) > 240, "sessions after the server was back", END_S)
    until(lambda: any(loss in said.read_text() for loss in LOSS), "Ray to see the loss", 60)
    keeper.kill()
    keeper.start()
    until(lambda: done(fleet) == TASKS * SAMPLES, "every session", END_S)
    told = events(fleet)
    again = [one["created"] for one in told if one["kind"] == "session.requeued"]
    results = Counter(one["session"] for one in told if one["kind"] == "session.result")
    assert len(results) == TASKS * SAMPLES
    assert set(results.values()) == {1}
    assert {name for name, state in nodes(fleet).items() if state == "live"} == {"n1", "n4", "n5"}
    log = said.read_text()
    assert "n3 is drained" in log
    assert log.count("runs a node") >= 5
    assert keeper.process is not None
    keeper.process.terminate()
    assert keeper.process.wait(60) == 0
    until(lambda: "live" not in nodes(fleet).values(), "all nodes to end")
    sys.stdout.write(
        f"nodes joined after {joined:.0f} s; of the lost machine's sessions the first ran again"
        f" {min(again) - lost_at:.1f} s after its loss (lease {LEASE_S:.0f} s);"
        f" {TASKS * SAMPLES} sessions in {time.time() - began:.0f} s\n"
    )


def test_sessions_outlive_the_cluster(machines: Callable[[int], Machines], fleet: Fleet) -> None:
    """The GCS restarts without Redis: the node ends after its sessions, a new cluster goes on."""
    ray = machines(1)
    ray.do("engine", str(fleet.ports["engine"]))
    keeper = place_nodes(fleet, ray.address)
    until(lambda: list(nodes(fleet).values()) == ["live"], "a node", 90)
    submit(fleet, 8)
    until(lambda: done(fleet) > 2, "the first sessions", END_S)
    ray.do("gcs", "restart")
    assert keeper.process is not None
    assert keeper.process.wait(60) != 0
    until(lambda: "live" not in nodes(fleet).values(), "the node to end", 60)
    before = done(fleet)
    submit(fleet, 12)  # eight of them are known
    ray.close()
    ray = machines(1)
    ray.do("engine", str(fleet.ports["engine"]))
    place_nodes(fleet, ray.address)
    until(lambda: done(fleet) == 12 * SAMPLES, "every session", END_S)
    results = Counter(one["session"] for one in events(fleet) if one["kind"] == "session.result")
    assert set(results.values()) == {1}
    assert len(results) == 12 * SAMPLES > before >= 3


def test_a_cluster_grows_with_the_queue_and_shrinks(tmp_path: Path, fleet: Fleet) -> None:
    """Ray's autoscaler adds machines while there is work, three at most, and removes them again."""
    began, port = time.time(), free_ports(1)[0]
    ray = Machines(tmp_path, "ray_autoscaled.py", str(port), RAY_AUTH_MODE="token")
    try:
        place_nodes(
            fleet, ray.address, "--max", "3", "--idle-s", "3",
            engine=f"http://127.0.0.1:{fleet.ports['engine']}",
            RAY_AUTH_MODE="token", TUGLINE_TOKEN=fleet.tokens["read"],
        )  # fmt: skip
        assert ray.ask("which") == ""
        submit(fleet, 10)
        until(lambda: ray.ask("which") == "m1,m2,m3", "three machines", 120)
        grown = time.time() - began
        until(lambda: list(nodes(fleet).values()) == ["live"] * 3, "their nodes", 90)
        until(lambda: done(fleet) == 10 * SAMPLES, "every session", END_S)
        until(lambda: "live" not in nodes(fleet).values(), "the nodes to be drained", 60)
        until(lambda: ray.ask("which") == "", "the machines to be removed", 120)
        results = Counter(
            one["session"] for one in events(fleet) if one["kind"] == "session.result"
        )
        assert set(results.values()) == {1}
        sys.stdout.write(f"grown after {grown:.0f} s, empty after {time.time() - began:.0f} s\n")
    finally:
        ray.close()
