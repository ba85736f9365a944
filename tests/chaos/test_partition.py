import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.audit import HUNG_S
from chaos.fleet import LEASE_S, Fleet, until
from chaos.storm import body
from chaos.wire import Api

DONE = 60.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A server with one node; another is started when the test wants one."""
    fleet = Fleet(tmp_path / "run", slots=4)
    with contextlib.closing(fleet):
        fleet.launch(nodes=1)
        yield fleet


def slow(name: str, fleet: Fleet) -> dict[str, Any]:
    """Four agents that take about four seconds each."""
    task = body(name, random.Random(1), fleet.callback)
    plan = '{"turns": 3, "pause_s": 1.2}'
    return {**task, "instruction": plan, "group": {"attempts": 10}, "callback": None}


def ended(api: Api, task: str) -> bool:
    """Whether nothing may happen to it any more."""
    return bool(api.get(f"/v1/tasks/{task}")["state"] == "released")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_that_was_cut_off_commits_nothing_it_has_lost(fleet: Fleet) -> None:
    """Frozen past its lease, it comes back to find its sessions done by another."""
    api = fleet.api()
    api.post("/v1/tasks", slow("cut", fleet))
    until(lambda: len(fleet.agents()) == 4, "four agents to run")
    (first,) = fleet.nodes
    frozen = time.time()
    first.freeze(3600)
    other = fleet.add_node("node1")
    other.start()
    until(lambda: ended(api, "cut"), "the other node to finish", DONE)
    first.thaw()
    events = api.get("/v1/events?limit=1000")
    (lost,) = (one for one in events if one["kind"] == "node.lost")
    assert lost["created"] - frozen <= LEASE_S + HUNG_S
    results = {one["session"]: one for one in api.get("/v1/results")["items"]}
    assert {one["status"] for one in results.values()} == {"completed"}
    assert {one["attempt"] for one in results.values()} == {0}, "the node's loss spends none"

    until(lambda: not fleet.agents(), "the lost agents to be ended")
    other.kill(3600)  # so that only the first can do what comes now
    api.post("/v1/tasks", slow("after", fleet))
    until(lambda: ended(api, "after"), "the first node to work again", DONE)
    again = {one["session"]: one for one in api.get("/v1/results")["items"]}
    assert results.items() <= again.items(), "nothing that was committed has changed"
    assert len(again) == 8
    told = [one["session"] for one in api.get("/v1/events?limit=1000")
            if one["kind"] == "session.result"]  # fmt: skip
    assert sorted(told) == sorted(again), "each was committed once"
