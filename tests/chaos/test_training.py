"""``tugline train`` with its own server, node and engine, each of which is killed repeatedly."""

import contextlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos.fleet import HERE, TUGLINE, Fleet
from support.training import check_totals, write_config
from tugline.trainers.config import CHECKPOINTS

KINDS = ("trainer", "engine", "server", "node0")
STEPS, TASKS, SAMPLES = 10, 2, 2
PATIENCE_S = 200.0
"""Time limit of one step of the test, on a busy machine."""
AGENT = f"""
import os, re, sys, time
sys.path.insert(0, {str(HERE)!r})
import agent
agent.TRIES = 60
step = re.search(r"g([0-9]+)-", os.environ["OPENAI_BASE_URL"])
turns = int(os.environ["TUGLINE_INSTRUCTION"])
messages = []
for turn in range(turns):
    messages.append({{"role": "user", "content": "go on"}})
    messages.append({{"role": "assistant", "content": agent.ask(messages)}})
    while step and int(open("GATE").read()) < int(step[1]) // {TASKS} + 1:
        time.sleep(0.05)
"""
"""An agent that waits after its first call until the gate is at its step."""


class Training:
    """A training run of separate processes in `folder`, whose agents wait at a gate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        rows = [{"id": f"train{i}", "question": str(1 + 5 * (i % 3 == 0))} for i in range(20)]
        plan = {"steps": STEPS, "tasks_per_step": TASKS, "samples": SAMPLES, "staleness": 1}
        plan["checkpoint_every"] = 1
        path = write_config(folder, schedule=plan, heldout={"every": 5})
        for name, part in (("train", rows), ("test", [row | {"id": "t"} for row in rows[:1]])):
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (folder / f"{name}.jsonl").write_text(lines)
        self.fleet = fleet = Fleet(folder, lease_s=20.0, slots=10)
        self.run, self.gate = folder / "run", folder / "gate"
        self.gate.write_text("0")
        (folder / "agent.py").write_text(AGENT.replace("GATE", str(self.gate)))
        shutil.copy(folder / "model" / "tokenizer.json", folder)
        self.engine = f"http://127.0.0.1:{fleet.ports['engine']}"
        config = json.loads(path.read_text()) | {"server": fleet.url}
        config["engine"] |= {"urls": [self.engine]}
        config["template"]["limits"] = {"agent_s": 600}
        command = [sys.executable, "-S", str(folder / "agent.py")]
        config["template"]["harness"]["options"]["command"] = command
        path.write_text(json.dumps(config))
        self.strikes: Counter[str] = Counter()
        self._struck_at, self._last = 0.0, "trainer"

    def launch(self) -> None:
        """Start engine, server, node and trainer."""
        fleet, port = self.fleet, str(self.fleet.ports["engine"])
        engine = str(HERE.parent / "engines" / "embedded_server.py")
        fleet.add("engine", sys.executable, engine, "model", port, "vllm").start()
        fleet.launch_server()
        fleet.add_node("node0").start()
        train = f"{TUGLINE} train config.json --out run $(test -e run/config.json && echo --resume)"
        fleet.add("trainer", "sh", "-c", f"exec {train}",
                  TUGLINE_TOKEN=fleet.tokens["client"]).start()  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether the trainer has ended with success."""
        process = self.fleet.programs["trainer"].process
        return process is not None and process.poll() == 0

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done` is true, while killed programs are started again."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if not self.over:
                self.fleet.supervise()
            if self.fleet.unexpected_exits or time.monotonic() > deadline:
                pytest.fail(f"waited for {what}: {self.fleet.unexpected_exits} {self._read_logs()}")
            time.sleep(0.01)

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait for the checkpoint of a step, after which it is published."""
        folder, name = self.run / CHECKPOINTS, f"*step-{step:06d}*"
        self.wait(lambda: any(folder.glob(name)), f"the checkpoint of step {step}")

    def _read_logs(self) -> str:
        tails = [path.read_text()[-1500:] for path in sorted(self.fleet.folder.glob("*.log"))]
        return "\n".join(tails)

    def has_recovered(self) -> bool:
        """Whether all programs run after the last strike, the engine with the latest weights."""
        if self.over:
            return True
        back = {"trainer": "weights.resumed", "node0": "node.joined"}.get(self._last)
        api = self.fleet.api(0.0)
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            loaded = httpx.get(f"{self.engine}/weight_info").json()["weight_version"]
            weights, events = api.get("/v1/weights"), api.get("/v1/events?limit=1000")
            later = {event["kind"] for event in events if event["created"] > self._struck_at}
            known = back is None or back in later
            return loaded == str(weights["version"]) and weights["paused"] is None and known
        return False

    def strike(self, name: str) -> None:
        """Kill a program, which is started again at once."""
        self._struck_at, self._last = time.time(), name
        self.fleet.programs[name].kill()
        self.strikes[name] += 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_kill_9_of_any_program_loses_no_training(tmp_path: Path) -> None:
    """Each of ten steps is struck twice: while it is sampled, and after its update."""
    training = Training(tmp_path / "fleet")
    with contextlib.closing(training.fleet):
        training.launch()
        for step in range(1, STEPS + 1):
            training.wait(training.has_recovered, f"recovery before step {step}")
            training.wait(lambda: bool(training.fleet.agents()), f"agents of step {step}")
            training.strike(KINDS[(step - 1) % 4])
            training.wait(training.has_recovered, f"recovery in step {step}")
            training.gate.write_text(str(step))
            training.wait_for_checkpoint(step)
            training.strike(KINDS[(step + 1) % 4])
        training.wait(lambda: training.over, "the end")
        assert training.strikes == dict.fromkeys(KINDS, 5)
        check(training)


def check(training: Training) -> None:
    """Every prompt was trained on once, in its step, and the ledgers add up."""
    state = json.loads((training.run / "summary.json").read_text())["state"]
    rows = check_totals(training.run, state, STEPS, STEPS * TASKS * SAMPLES)
    assert [score["step"] for score in state["scores"]] == [0, 5, 10]
    check_reports(training, rows)
    items = training.fleet.api().get("/v1/results?limit=1000")["items"]
    results = [item for item in items if ".g" in item["task"]]  # of training sessions
    assert len(results) == STEPS * TASKS * SAMPLES
    assert all(result["status"] == "completed" for result in results)
    instances = Counter(result["task"].rpartition("-")[2] for result in results)
    assert instances == {f"train{i}": SAMPLES for i in range(STEPS * TASKS)}
    sampled: Counter[int] = Counter()
    for result in results:
        number = int(result["task"].partition(".g")[2].partition("-")[0])
        sampled[number // TASKS + 1] += result["sampled"]
    assert {row["step"]: row["rollout/sampled"] for row in rows} == sampled


def check_reports(training: Training, rows: list[dict[str, Any]]) -> None:
    """The server has the same figures of every step as the run's own file."""
    api = training.fleet.api()
    (run,) = api.get("/v1/runs")
    assert (run["name"].startswith(training.run.name), run["step"]) == (True, STEPS)
    known = {step["step"]: step["figures"] for step in api.get(f"/v1/runs/{run['name']}/steps")}
    for row in rows:
        assert known[row["step"]].items() >= {**row, "step": None}.items() - {("step", None)}
