"""One unlucky part at a time: nobody else's session fails, and no attempt is spent by a machine."""

import contextlib
import errno
import json
import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.audit import HUNG_S
from chaos.fleet import TUGLINE, Fleet, until
from chaos.storm import body
from chaos.wire import Api, Refused
from tugline.recording import file as recordings

DONE = 90.0
TURNS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
Open = Callable[..., Fleet]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Open]:
    """Starts a fleet of one node."""
    with contextlib.ExitStack() as stack:

        def launched(nodes: int = 1, **settings: Any) -> Fleet:
            fleet = Fleet(tmp_path / "run", slots=4, **settings)
            stack.enter_context(contextlib.closing(fleet))
            fleet.launch(nodes=nodes)
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


def fill(file: Path) -> None:
    """Leave not a byte."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    out.write(os.urandom(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def test_an_engine_that_hangs_costs_its_agents_nothing(launch: Open) -> None:
    """SIGSTOP for longer than their time: their clock stands still, and they finish."""
    fleet = launch(engine={"silent_s": 1.0})
    ask(fleet, "hung", limits={"agent_s": 20.0})
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    engine = fleet.programs["engine"]
    engine.freeze(3600)
    thaw = time.time() + 22.0
    until(lambda: "replica ejected" in (fleet.folder / "node0.log").read_text(), "an ejection")
    until(lambda: time.time() > thaw, "more than the agents' time to pass")
    engine.thaw()
    wait_until_all_is_well(fleet, 4)


def test_agents_whose_time_ends_before_a_hang_is_noticed_are_not_charged(launch: Open) -> None:
    """The engine does not answer when they end: it failed, and they run again for nothing."""
    fleet = launch(engine={"silent_s": 60.0})
    ask(fleet, "hung", pause_s=2.0, limits={"agent_s": 20.0})
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    engine = fleet.programs["engine"]
    engine.freeze(3600)
    until(lambda: len(events(fleet, "session.requeued")) >= 4, "their time to end", DONE)
    assert "replica ejected" not in (fleet.folder / "node0.log").read_text()
    engine.thaw()
    wait_until_all_is_well(fleet, 4)


def test_a_broken_node_takes_no_work_from_a_healthy_one(launch: Open) -> None:
    """Nothing can be opened on one of two nodes: it is in quarantine, all is done by the other."""
    fleet = launch(nodes=2)
    api = fleet.api()
    until(lambda: api.get("/v1/status")["nodes"] == 2, "both nodes to join")
    sessions = fleet.folder / "node1" / "nodes" / "node1" / "sessions"
    sessions.rmdir()
    sessions.write_text("no folder")
    for number in range(6):
        ask(fleet, f"t{number}", pause_s=0.1)
    wait_until_all_is_well(fleet, 24)
    faults = {one["name"]: one["fault"] for one in api.get("/v1/nodes")}
    assert faults["node0"] == ""
    assert faults["node1"]


def test_a_node_that_was_cut_off_commits_nothing_it_has_lost(launch: Open) -> None:
    """Frozen past its lease, it comes back to find its sessions done by another."""
    fleet = launch()
    ask(fleet, "cut", pause_s=1.2)
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    (first,) = fleet.nodes
    frozen = time.time()
    first.freeze(3600)
    other = fleet.add_node("node1")
    other.start()
    found = wait_until_all_is_well(fleet, 4)
    first.thaw()
    (lost,) = events(fleet, "node.lost")
    assert lost["created"] - frozen <= fleet.lease_s + HUNG_S
    until(lambda: not fleet.agents(), "the lost agents to be ended")
    other.kill(3600)  # so that only the first can do what comes now
    ask(fleet, "after")
    again = wait_until_all_is_well(fleet, 8)
    assert found.items() <= again.items(), "nothing that was committed has changed"
    told = [one["session"] for one in events(fleet, "session.result")]
    assert sorted(told) == sorted(again), "each was committed once"


def test_a_full_disk_refuses_work_and_loses_none(small_disk: Path, launch: Open) -> None:
    """What was accepted ends once there is room; what was refused was refused clearly."""
    fleet = launch()
    api = fleet.api()
    for number in range(8):
        ask(fleet, f"f{number}")
    until(lambda: bool(fleet.agents()), "agents to run")
    fill(small_disk / "ballast")
    late = {**body("late", random.Random(3), fleet.callback), "callback": None, "group": {}}
    status, text = api.once("POST", "/v1/tasks", json.dumps(late).encode())
    refusal = json.loads(text)["detail"]
    assert (status, "disk" in refusal or "full" in refusal) == (503, True), refusal
    assert api.get("/v1/status")["tasks_open"] >= 1, "reading goes on"
    (small_disk / "ballast").unlink()
    api.post("/v1/tasks", late)
    until(lambda: api.get("/v1/status")["tasks_open"] == 0, "all tasks to end", DONE)
    results = api.get("/v1/results?limit=1000")["items"]
    assert len({one["session"] for one in results}) == len(results) == 9 * 4
    assert {one["status"] for one in results} == {"completed"}
    assert not fleet.deserters


def test_a_twin_is_refused_and_harms_nobody(launch: Open) -> None:
    """A second node of the same name ends with an error; the first one's sessions go on."""
    fleet = launch()
    ask(fleet, "first", pause_s=1.0)
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    twin = fleet.add_node("twin")
    twin.argv = tuple("node0" if one == "twin" and twin.argv[n - 1] == "--name" else one
                      for n, one in enumerate(twin.argv))  # fmt: skip
    twin.start()
    until(lambda: not twin.alive, "the twin to end")
    assert "is at work" in (fleet.folder / "twin.log").read_text()
    wait_until_all_is_well(fleet, 4)
    assert len(events(fleet, "node.joined")) == 1
    assert not events(fleet, "session.requeued")


@pytest.mark.parametrize("first", ["server", "node0"])
def test_a_full_journal_outlives_restarts_in_any_order(launch: Open, first: str) -> None:
    """Results that had nowhere to go are committed, not run again."""
    fleet = launch(lease_s=30.0)
    ask(fleet, "kept")
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    server, (node,) = fleet.programs["server"], fleet.nodes
    server.kill(3600)
    journal = fleet.folder / "node0" / "nodes" / "node0" / "journal"
    until(lambda: len(list(journal.glob("*.result"))) == 4, "four results in the journal", DONE)
    node.kill(3600)
    if first == "server":
        fleet.start_server(time.time())
        until(lambda: bool(fleet.outages[-1].ready), "the server to answer")
        node.start()
    else:
        node.start()
        until(lambda: "does not answer" in (fleet.folder / "node0.log").read_text(), "an offer")
        fleet.start_server(time.time())
    wait_until_all_is_well(fleet, 4)
    assert len(events(fleet, "session.leased")) == 4


def test_a_clock_set_back_keeps_no_dead_node(launch: Open, tmp_path: Path) -> None:
    """An hour: the sessions of a node that died are another's after a lease all the same."""
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("needs libfaketime (Debian's package libfaketime)")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    shifted = (
        *("env", f"LD_PRELOAD={libraries[0]}", f"FAKETIME_TIMESTAMP_FILE={clock}"),
        *("FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1"),
    )
    fleet = launch(cli=(*shifted, TUGLINE))
    (node,) = fleet.nodes
    ask(fleet, "moved", pause_s=1.0)
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    clock.write_text("-3600")
    shown = subprocess.run((*shifted, "date", "+%s"), capture_output=True, check=True, timeout=10)
    assert time.time() - int(shown.stdout) == pytest.approx(3600, abs=5)
    node.kill(3600)
    killed = time.time()
    fleet.add_node("node1").start()
    wait_until_all_is_well(fleet, 4)
    (lost,) = events(fleet, "node.lost")
    assert 0 <= lost["created"] - killed <= fleet.lease_s + HUNG_S


def test_a_restored_store_mixes_no_two_runs(launch: Open) -> None:
    """Under a running node: all is run again, each in a recording with one run's calls."""
    fleet = launch()
    ask(fleet, "again", pause_s=0.1)
    until(lambda: bool(events(fleet, "session.leased")), "a lease")
    live, backup = fleet.folder / "server" / "server.db", fleet.folder / "backup.db"
    with contextlib.closing(sqlite3.connect(live)) as old, contextlib.closing(
        sqlite3.connect(backup)
    ) as new:  # fmt: skip
        old.backup(new)
    wait_until_all_is_well(fleet, 4)
    position = fleet.api().get("/v1/status")["position"]
    fleet.programs["server"].kill(3600)
    for suffix in ("-wal", "-shm"):
        Path(f"{live}{suffix}").unlink(missing_ok=True)
    backup.replace(live)
    fleet.start_server(time.time())
    wait_until_all_is_well(fleet, 4)
    late = fleet.api().get(f"/v1/results?after={position}")["items"]
    assert len(late) == 4, "who waits at an old position sees what is new"
    folder = fleet.folder / "node0" / "nodes" / "node0" / "recordings"
    calls = {path.name: len(recordings.read(path).calls) for path in folder.glob("*.rec")}
    assert len(calls) >= 4
    assert max(calls.values()) == TURNS, calls


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
