"""One unlucky part at a time: nobody else's session fails, and no attempt is spent by a machine."""

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import Fleet, until
from chaos.storm import body
from chaos.wire import Api, Refused

DONE = 90.0
TURNS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
Open = Callable[..., Fleet]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Open]:
    """Starts a fleet of one node."""
    with contextlib.ExitStack() as stack:

        def launched(**settings: Any) -> Fleet:
            fleet = Fleet(tmp_path / "run", slots=4, **settings)
            stack.enter_context(contextlib.closing(fleet))
            fleet.launch(nodes=1)
            return fleet

        yield launched


def ask(fleet: Fleet, name: str, *, pause_s: float = 0.5, **changes: Any) -> None:
    """Four agents of three turns each."""
    task = body(name, random.Random(1), fleet.callback)
    plan = json.dumps({"turns": TURNS, "pause_s": pause_s})
    task |= {"instruction": plan, "group": {"attempts": 2}, "callback": None, **changes}
    fleet.api().post("/v1/tasks", task)


def results(api: Api) -> dict[str, Any]:
    """All results by session."""
    return {one["session"]: one for one in api.get("/v1/results?limit=1000")["items"]}


def wait_until_all_is_well(fleet: Fleet, count: int) -> dict[str, Any]:
    """All sessions completed, were rewarded and trained, and the machine spent no attempt."""
    api = fleet.api()
    until(lambda: len(results(api)) == count, f"{count} results", DONE)
    found = results(api)
    assert {(one["status"], one["attempt"], one["reward"]) for one in found.values()} == {
        ("completed", 0, 1.0)
    }, found
    assert all(one["trained"] == one["sampled"] > 0 for one in found.values())
    return found


def events(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    """All that happened of this kind, in order."""
    told = fleet.api().get("/v1/events?limit=1000")
    return [one for one in told if one["kind"] == kind]


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
    launch: Open, silent_s: float, pause_s: float, *, noticed: bool
) -> None:
    """SIGSTOP for longer than their time, whether it is noticed before that ends or not."""
    fleet = launch(engine={"silent_s": silent_s})
    ask(fleet, "hung", pause_s=pause_s, limits={"agent_s": 20.0})
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    fleet.programs["engine"].freeze(3600)
    thaw = time.time() + 22.0
    if noticed:
        until(lambda: time.time() > thaw, "more than the agents' time to pass")
    else:
        until(lambda: len(events(fleet, "session.requeued")) >= 4, "their time to end", DONE)
    assert ("replica ejected" in (fleet.folder / "node0.log").read_text()) is noticed
    fleet.programs["engine"].thaw()
    wait_until_all_is_well(fleet, 4)


def test_a_full_disk_refuses_work_and_loses_none(small_disk: Path, launch: Open) -> None:
    """What was accepted ends once there is room; what was refused was refused clearly."""
    fleet = launch()
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
    until(lambda: api.get("/v1/status")["tasks_open"] == 0, "all tasks to end", DONE)
    results = api.get("/v1/results?limit=1000")["items"]
    assert len({one["session"] for one in results}) == len(results) == 9 * 4
    assert {one["status"] for one in results} == {"completed"}
    assert not fleet.deserters


def test_bit_rot_is_told_and_stops_nobody(launch: Open) -> None:
    """One bit in one result: that one is an error, all others are read."""
    fleet = launch()
    ask(fleet, "rot", pause_s=0.0)
    found = wait_until_all_is_well(fleet, 4)
    victim = min(found)
    (blob,) = (fleet.folder / "server" / "blobs").glob(f"*/{victim}.*")
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    for session in found:
        path = f"/v1/sessions/{session}/trajectory"
        if session != victim:
            assert fleet.api().bytes("GET", path)
            continue
        with pytest.raises(Refused, match="is damaged") as caught:
            fleet.api().bytes("GET", path)
        assert caught.value.status == 404
