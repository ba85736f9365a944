"""Judge stored sessions again with a repaired test, with ``kill -9`` in the middle.

Scripted agents make one model call of a stub engine and leave one of five answers. The test that
grades them is wrong. Then the stored sessions are judged with the repaired test, by one command
that is killed several times and repeated. For comparison the same tasks are run with the repaired
test from the start (fresh grading), and some of them without any test, so that the difference is
the CPU time of EVAL. CPU times are those of the whole command with all of its children.

    python benchmarks/rejudge/run.py [--json] [--sessions 1000] [--kills 3]
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tugline.recording.trajectories import read_results
from tugline.recording.verdicts import VERDICTS, VerdictEntry
from tugline.types import Limits, PluginSpec, Task

MODEL = Path(str(files("tugline.demo"))) / "warm_start_model"
ENGINE = Path(__file__).parents[1] / "hostile" / "engine.py"
TUGLINE = Path(sys.executable).with_name("tugline")
SAMPLES = 4
ANSWERS = ("5", "6", "", "5 5", "five")
"""What agents leave; the wrong test expects the second, the repaired one the first."""
CALL = ENGINE.with_name("ask.sh").read_text()
"""Makes one model call."""


class Cost(NamedTuple):
    """Time of a command and of all its children."""

    wall_s: float
    cpu_s: float


def make_evaluator(expected: str) -> PluginSpec:
    """Return the evaluator that expects an answer."""
    script = f"[ \"$(cat answer.txt)\" = '{expected}' ] && echo 'ok 1 - sum'; echo 1..1"
    return PluginSpec("tests", {"command": ["sh", "-c", script], "format": "tap"})


def make_agent(number: int) -> str:
    """Return the script of a task's agent."""
    return f"({CALL}) >/dev/null\necho '{ANSWERS[number % 5]}' >answer.txt"


def write_tasks(path: Path, sessions: int, evaluator: PluginSpec) -> None:
    """Write tasks of four samples each."""
    tasks = [
        Task(
            id=f"sum{number}",
            instruction="Write the sum of 2 and 3 to answer.txt.",
            harness=PluginSpec("shell", {"command": ["bash", "-c", make_agent(number)]}),
            evaluator=evaluator,
            samples=SAMPLES,
            limits=Limits(init_s=120.0, agent_s=120.0, eval_s=120.0),
        )
        for number in range(sessions // SAMPLES)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, tasks)))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[list[str]]:
    """Run the stub engine; yield the options that name it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "engine.log").open("wb") as log:
        engine = subprocess.Popen([sys.executable, str(ENGINE), str(port)], stdout=log, stderr=log)
    try:
        yield [
            *("--engine", f"http://127.0.0.1:{port}", "--renderer", "qwen3"),
            *("--tokenizer", str(MODEL / "tokenizer.json")),
        ]
    finally:
        engine.terminate()
        engine.wait(30)


def measure(folder: Path, name: str, command: Sequence[str], kill_at: int | None = None) -> Cost:
    """Run a command to its end, or kill it once the history has `kill_at` lines."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen([str(TUGLINE), *command], cwd=folder, stdout=log, stderr=log)
    history = folder / "stored" / "verdicts" / VERDICTS
    while process.poll() is None:
        time.sleep(0.05)
        lines = history.read_bytes().count(b"\n") if history.exists() else 0
        if kill_at is not None and lines >= kill_at:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    if kill_at is None and process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.monotonic() - began, cpu)


def run(sessions: int, kills: int) -> dict[str, Any]:
    """Run everything; return the figures."""
    few = max(SAMPLES, sessions // 5)
    wrong = make_evaluator(ANSWERS[1])
    repaired = make_evaluator(ANSWERS[0])
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as name:
        folder = Path(name)
        write_tasks(folder / "stored.jsonl", sessions, wrong)
        write_tasks(folder / "fresh.jsonl", sessions, repaired)
        write_tasks(folder / "none.jsonl", few, PluginSpec("session_completed"))
        (folder / "repaired.json").write_bytes(msgspec.json.encode(repaired))
        costs = {}
        with serving(folder) as engine:
            for kind in ("stored", "fresh", "none"):
                command = ["run", f"{kind}.jsonl", "--out", kind, *engine]
                costs[kind] = measure(folder, kind, command)
        again = ["rejudge", "stored", "--evaluator", "repaired.json", "--json"]
        recorded = sorted((folder / "stored").rglob("*.rec"))
        bytes_before = [path.read_bytes() for path in recorded]
        for number in range(kills):
            measure(folder, "killed", again, kill_at=sessions * (number + 1) // (kills + 1))
        costs["rejudge"] = measure(folder, "rejudge", again)
        lines = (folder / "stored/verdicts" / VERDICTS).read_bytes().splitlines()
        entries = [msgspec.json.decode(line, type=VerdictEntry) for line in lines]
        now = {each.session: each.reward.value if each.reward else None for each in entries}
        fresh = {each.session: each.reward for each in read_results(folder / "fresh")}
        old = {each.session: each.reward for each in read_results(folder / "stored")}
        kept = [path.read_bytes() for path in recorded] == bytes_before
    evaluation = costs["fresh"].cpu_s / sessions - costs["none"].cpu_s / few
    return {
        "sessions": sessions,
        "equal_to_fresh": sum(now.get(each) == reward for each, reward in fresh.items()),
        "changed": sum(now.get(each) != reward for each, reward in old.items()),
        "verdicts": len(entries),
        "kills": kills,
        "recordings_unchanged": kept,
        "cpu_s_a_session_of_eval": round(evaluation, 4),
        **(
            {}
            if kills
            else {"cpu_s_a_session_of_rejudge": round(costs["rejudge"].cpu_s / sessions, 4)}
        ),
        "wall_s": {name: round(cost.wall_s, 1) for name, cost in costs.items()},
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3, help="0 measures the CPU time of rejudge")
    options = parser.parse_args()
    figures = run(options.sessions, options.kills)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
