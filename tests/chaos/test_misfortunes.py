"""One unlucky part at a time: nobody else's session fails, and no attempt is spent by a machine."""

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
from chaos.storm import body
from tugline.recording import file as recordings

DONE = 90.0
TURNS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@contextlib.contextmanager
def launched(folder: Path, **engine: float) -> Iterator[Fleet]:
    """A fleet of one node."""
    with contextlib.closing(Fleet(folder / "run", slots=4, engine=engine)) as fleet:
        fleet.launch(nodes=1)
        yield fleet


def ask(fleet: Fleet, name: str, *, pause_s: float = 0.5, **changes: Any) -> None:
    """Four agents of three turns each."""
    task = body(name, random.Random(1), fleet.callback)
    plan = json.dumps({"turns": TURNS, "pause_s": pause_s})
    task |= {"instruction": plan, "group": {"attempts": 2}, "callback": None, **changes}
    fleet.api().post("/v1/tasks", task)


def end(fleet: Fleet) -> Any:
    """Wait until every task is over; the results."""
    api = fleet.api()
    until(lambda: api.get("/v1/status")["tasks_open"] == 0, "all tasks to end", DONE)
    return api.get("/v1/results?limit=1000")["items"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of the server, on a disk of its own."""
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
        pytest.param(1.0, 0.5, True, id="their clock stands still, and they finish"),
        pytest.param(60.0, 2.0, False, id="they end first, and run again for nothing"),
    ],
)
def test_an_engine_that_hangs_costs_its_agents_nothing(
    tmp_path: Path, silent_s: float, pause_s: float, *, noticed: bool
) -> None:
    """SIGSTOP for longer than their time, whether it is noticed before that ends or not."""
    with launched(tmp_path, silent_s=silent_s) as fleet:
        ask(fleet, "hung", pause_s=pause_s, limits={"agent_s": 20.0})
        until(lambda: len(fleet.agents()) == 4, "four agents to run")
        fleet.programs["engine"].freeze(3600)
        thaw = time.time() + 22.0

        def is_over() -> bool:
            events = fleet.api().get("/v1/events?limit=1000")
            requeued = [one for one in events if one["kind"] == "session.requeued"]
            return time.time() > thaw and (noticed or len(requeued) >= 4)

        until(is_over, "more than the agents' time to pass", DONE)
        assert ("replica ejected" in (fleet.folder / "node0.log").read_text()) is noticed
        fleet.programs["engine"].thaw()
        results = end(fleet)
    ends = [(one["status"], one["attempt"], one["reward"]) for one in results]
    assert ends == [("completed", 0, 1.0)] * 4, "all rewarded, and the machine spent no attempt"
    assert all(one["trained"] == one["sampled"] > 0 for one in results)


def test_a_full_disk_refuses_work_and_loses_none(small_disk: Path, tmp_path: Path) -> None:
    """What was accepted ends once there is room; what was refused was refused clearly."""
    with launched(tmp_path) as fleet:
        api = fleet.api()
        for number in range(8):
            ask(fleet, f"f{number}")
        until(lambda: bool(fleet.agents()), "agents to run")
        ballast = small_disk / "ballast"
        fill = ["dd", "if=/dev/zero", f"of={ballast}", "bs=1k"]
        assert subprocess.run(fill, capture_output=True, check=False, timeout=30).returncode == 1
        late = {**body("late", random.Random(3), fleet.callback), "callback": None, "group": {}}
        status, text = api.once("POST", "/v1/tasks", json.dumps(late).encode())
        refusal = json.loads(text)["detail"]
        assert (status, "disk" in refusal or "full" in refusal) == (503, True), refusal
        assert api.get("/v1/status")["tasks_open"] >= 1, "reading goes on"
        ballast.unlink()
        api.post("/v1/tasks", late)
        results = end(fleet)
    assert len({one["session"] for one in results}) == len(results) == 9 * 4
    assert {one["status"] for one in results} == {"completed"}
    assert not fleet.deserters


def test_a_restored_store_mixes_no_two_runs(tmp_path: Path) -> None:
    """Under a running node: all is run again, each in a recording with one run's calls."""
    with launched(tmp_path) as fleet:
        ask(fleet, "again", pause_s=0.1)
        until(lambda: bool(fleet.agents()), "an agent to run")
        live, backup = fleet.folder / "server" / "server.db", fleet.folder / "backup.db"
        stores = [contextlib.closing(sqlite3.connect(path)) for path in (live, backup)]
        with stores[0] as old, stores[1] as new:
            old.backup(new)
        end(fleet)
        position = fleet.api().get("/v1/status")["position"]
        fleet.programs["server"].kill(3600)
        for suffix in ("-wal", "-shm"):
            Path(f"{live}{suffix}").unlink(missing_ok=True)
        backup.replace(live)
        fleet.start_server(time.time())
        assert [one["status"] for one in end(fleet)] == ["completed"] * 4
        late = fleet.api().get(f"/v1/results?after={position}")["items"]
        assert len(late) == 4, "who waits at an old position sees what is new"
        folder = fleet.folder / "node0" / "nodes" / "node0" / "recordings"
        calls = {path.name: len(recordings.read(path).calls) for path in folder.glob("*.rec")}
    assert len(calls) >= 4
    assert max(calls.values()) == TURNS, calls
