"""Recorded sessions are judged again on real nodes while processes are killed."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import HERE, TUGLINE, Fleet, Program, until
from support.deployment import CALL
from support.recorded import FILES, REPAIRED, WORKS

RUN = "first"
SAMPLES = 3
OLD = {"name": "tests", "options": {}}
SLOW = {"test_bill.py": f"import time; time.sleep(1)\n{REPAIRED['test_bill.py']}"}
NEW = {"name": "tests", "options": {"files": SLOW}}
REVISED = {f"right-{sample}" for sample in range(SAMPLES)}
"""Sessions whose reward is another one with the repaired test; it was that of `wrong` before."""


def make_task(name: str, evaluator: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A task whose agents make one of `WORKS`, after a model call."""
    files = {path: change.data for path, change in WORKS[name].files.items() if change}
    script = f"{CALL}for path, data in {files!r}.items(): open(path, 'wb').write(data)\n"
    return {
        "id": f"{prefix}{name}",
        "instruction": "mend the bill",
        "harness": {"name": "shell", "options": {"command": ["python3", "-I", "-c", script]}},
        "evaluator": evaluator,
        "runtime": {"name": "local"},
        "files": FILES,
        "samples": SAMPLES,
    }


def launch(folder: Path) -> Fleet:
    """Start an engine, a server and two nodes."""
    fleet = Fleet(folder)
    port = str(fleet.ports["engine"])
    fleet.add("engine", sys.executable, str(HERE / "engine.py"), port, "tokenizer.json").start()
    fleet.launch_server()
    for name in ("node0", "node1"):
        fleet.add_node(name).start()
    return fleet


def run_tasks(fleet: Fleet, tasks: list[dict[str, Any]], run: str) -> dict[str, float | None]:
    """Run tasks to their end as a run; rewards by session."""
    api = fleet.api()
    api.bytes("PUT", f"/v1/runs/{run}", json.dumps({"kind": "run"}).encode())
    api.post(f"/v1/tasks?run={run}", tasks)
    count = SAMPLES * len(tasks)
    page = f"/v1/results?run={run}&limit=1000"
    until(lambda: len(api.get(page)["items"]) == count, f"the sessions of {run}", 240)
    return {item["session"]: item["reward"] for item in api.get(page)["items"]}


def rejudge(fleet: Fleet) -> Program:
    """Start the command, which puts the new verdicts in force."""
    (fleet.folder / "new.json").write_text(json.dumps(NEW))
    command = ("rejudge", RUN, "--server", fleet.url, "--token", fleet.tokens["client"])
    options = ("--evaluator", "new.json", "--use", "new")
    program = fleet.add("client", TUGLINE, *command, *options)
    program.start()
    return program


def supervise(fleet: Fleet, client: Program, kills: list[Program]) -> None:
    """Kill programs, one after each three verdicts, until the client has ended by itself."""
    api = fleet.api()
    deadline = time.monotonic() + 300
    while client.alive or client.back is not None:
        assert time.monotonic() < deadline, "the client did not end"
        revive(fleet)
        if kills and fleet.programs["server"].alive:
            judged = api.get(f"/v1/results?run={name_run(api)}&limit=1000")["items"]
            if len(judged) >= 3 * (4 - len(kills)):
                kills.pop(0).kill(back_in_s=1.0)
        time.sleep(0.05)


def revive(fleet: Fleet) -> None:
    """Start killed programs again that are due."""
    for program in fleet.programs.values():
        if program.back is not None and program.back <= time.time():
            program.start()


def name_run(api: Any) -> str:
    """The run that judges."""
    runs = api.get("/v1/runs")
    return next((run["name"] for run in runs if run["kind"] == "rejudge"), "none")


@pytest.mark.slow  # real processes, which are killed and start again
def test_kills_lose_no_verdict_and_repeat_none(tmp_path: Path) -> None:
    """A node, the server and the client are killed; all verdicts equal those of a fresh grading."""
    fleet = launch(tmp_path)
    try:
        rewards = run_tasks(fleet, [make_task(name, OLD) for name in WORKS], RUN)
        assert {name for name, reward in rewards.items() if reward} == {
            f"wrong-{sample}" for sample in range(SAMPLES)
        }
        api = fleet.api()
        acked = api.get(f"/v1/results?run={RUN}&limit=1000")["cursor"]
        client = rejudge(fleet)
        supervise(fleet, client, [fleet.programs["node0"], fleet.programs["server"], client])
        assert client.process is not None
        assert client.process.returncode == 0, (tmp_path / "client.log").read_text()
        check(fleet, rewards, acked)
    finally:
        fleet.close()


def check(fleet: Fleet, rewards: dict[str, float | None], acked: int) -> None:
    """Compare all verdicts with a fresh grading, and what a consumer at `acked` gets."""
    api = fleet.api()
    tasks = [make_task(name, NEW, "fresh-") for name in WORKS]
    fresh = run_tasks(fleet, tasks, "fresh")
    for session, before in rewards.items():
        history = api.get(f"/v1/sessions/{session}/verdicts")
        assert [each["number"] for each in history] == [1, 2], "each is judged once"
        assert [each["in_force"] for each in history] == [False, True]
        assert history[0]["reward"]["value"] == before
        assert history[1]["reward"]["value"] == fresh[f"fresh-{session}"]
    later = api.get(f"/v1/results?after={acked}&limit=1000")["items"]
    revised = {item["session"]: item for item in later if item["run"] == RUN}
    changed = {name for name, before in rewards.items() if fresh[f"fresh-{name}"] != before}
    assert changed >= REVISED
    assert set(revised) == changed
    assert {item["revision"] for item in revised.values()} == {1}
    judging = api.get(f"/v1/results?run={name_run(api)}&limit=1000")["items"]
    assert Counter(item["judges"] for item in judging) == Counter(list(rewards))
    ran = {
        item["session"]: item["node"].split(".")[0]
        for item in api.get(f"/v1/results?run={RUN}&limit=1000")["items"]
    }
    assert set(ran.values()) == {"node0", "node1"}
    assert all(item["node"].split(".")[0] == ran[item["judges"]] for item in judging)
    assert not any(item["sampled"] for item in judging)
    view = api.get(f"/v1/runs/{name_run(api)}")
    assert (view["parent"], view["configuration"]["evaluator"]["name"]) == (RUN, "tests")
    assert view["ended"] is not None
