"""One fault at a time: no other session fails, and faults of machines use up no attempt."""

import contextlib
import json
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import Fleet, until
from chaos.storm import make_random_task
from tugline.recording import file as recordings

DONE = 90.0
TURNS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@contextlib.contextmanager
def launched(folder: Path, **engine: float) -> Iterator[Fleet]:
    """Start a fleet with one node."""
    with contextlib.closing(Fleet(folder / "run", slots=4, engine=engine)) as fleet:
        fleet.launch(nodes=1)
        yield fleet


def submit(fleet: Fleet, name: str, *, pause_s: float = 0.5, **changes: Any) -> None:
    """Submit four agents of three turns each."""
    task = make_random_task(name, random.Random(1), fleet.callback)
    plan = json.dumps({"turns": TURNS, "pause_s": pause_s})
    task |= {"instruction": plan, "group": {"attempts": 2}, "callback": None, **changes}
    fleet.api().post("/v1/tasks", task)


def wait_for_results(fleet: Fleet) -> Any:
    """Wait until every task has ended; the results."""
    api = fleet.api()
    until(lambda: api.get("/v1/status")["tasks_open"] == 0, "all tasks to end", DONE)
    return api.get("/v1/results?limit=1000")["items"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The server's folder, on a small file system of its own."""
    disk = tmp_path / "run" / "server"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={24 << 20}", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


@pytest.mark.parametrize(
    ("silent_s", "pause_s", "noticed"),
    [
        pytest.param(1.0, 0.5, True, id="noticed, so that the agents' time is paused"),
        pytest.param(60.0, 2.0, False, id="not noticed, so that the sessions are requeued"),
    ],
)
def test_a_hanging_engine_fails_no_session(
    tmp_path: Path, silent_s: float, pause_s: float, *, noticed: bool
) -> None:
    """An engine that is stopped for longer than the agents' time limit costs no attempt.

    That holds whether or not the node notices the silence before the limit.
    """
    with launched(tmp_path, silent_s=silent_s) as fleet:
        submit(fleet, "hung", pause_s=pause_s, limits={"agent_s": 20.0})
        until(lambda: len(fleet.agents()) == 4, "four agents to run")
        fleet.programs["engine"].freeze(3600)
        thaw = time.time() + 22.0

        def is_over() -> bool:
            events = fleet.api().get("/v1/events?limit=1000")
            requeued = [event for event in events if event["kind"] == "session.requeued"]
            return time.time() > thaw and (noticed or len(requeued) >= 4)

        until(is_over, "more than the agents' time to pass", DONE)
        # Unless it is noticed before, it is probed when the first session ends in silence.
        assert "replica ejected" in (fleet.folder / "node0.log").read_text()
        fleet.programs["engine"].thaw()
        results = wait_for_results(fleet)
    ends = [(result["status"], result["attempt"], result["reward"]) for result in results]
    assert ends == [("completed", 0, 1.0)] * 4, "all rewarded, and no attempt is used up"
    assert all(result["trained"] == result["sampled"] > 0 for result in results)


def test_a_full_disk_refuses_tasks_and_loses_none(small_disk: Path, tmp_path: Path) -> None:
    """New tasks are refused with the reason; accepted ones end once there is room."""
    with launched(tmp_path) as fleet:
        api = fleet.api()
        for number in range(8):
            submit(fleet, f"f{number}")
        until(lambda: bool(fleet.agents()), "agents to run")
        ballast = small_disk / "ballast"
        fill = ["dd", "if=/dev/zero", f"of={ballast}", "bs=1k"]
        assert subprocess.run(fill, capture_output=True, check=False, timeout=30).returncode == 1
        late = make_random_task("late", random.Random(3), fleet.callback)
        late |= {"callback": None, "group": {}}
        status, text = api.once("POST", "/v1/tasks", json.dumps(late).encode())
        refusal = json.loads(text)["detail"]
        assert (status, "disk" in refusal or "full" in refusal) == (503, True), refusal
        assert api.get("/v1/status")["tasks_open"] >= 1, "reading works"
        ballast.unlink()
        api.post("/v1/tasks", late)
        results = wait_for_results(fleet)
    assert len({result["session"] for result in results}) == len(results) == 9 * 4
    assert {result["status"] for result in results} == {"completed"}
    assert not fleet.unexpected_exits


def test_a_restored_store_mixes_no_two_runs(tmp_path: Path) -> None:
    """A store restored under a running node runs sessions again, with recordings of their own."""
    with launched(tmp_path) as fleet:
        submit(fleet, "again", pause_s=0.1)
        until(lambda: bool(fleet.agents()), "an agent to run")
        live, backup = fleet.folder / "server" / "server.db", fleet.folder / "backup.db"
        stores = [contextlib.closing(sqlite3.connect(path)) for path in (live, backup)]
        with stores[0] as old, stores[1] as new:
            old.backup(new)
        wait_for_results(fleet)
        position = fleet.api().get("/v1/status")["position"]
        fleet.programs["server"].kill(3600)
        for suffix in ("-wal", "-shm"):
            Path(f"{live}{suffix}").unlink(missing_ok=True)
        backup.replace(live)
        fleet.start_server(time.time())
        assert [result["status"] for result in wait_for_results(fleet)] == ["completed"] * 4
        late = fleet.api().get(f"/v1/results?after={position}")["items"]
        assert len(late) == 4, "consumers at an old position get new results"
        folder = fleet.folder / "node0" / "nodes" / "node0" / "recordings"
        calls = {path.name: len(recordings.read(path).calls) for path in folder.glob("*.rec")}
    assert len(calls) >= 4
    assert max(calls.values()) == TURNS, calls
