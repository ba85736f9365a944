"""Steps with and without `schedule.refill` on tasks of which a third are always solved.

``python benchmarks/training/refill.py`` runs ``tugline train`` for real, with the model, the agent
and the log-normal tool times of ``staleness.py``: 0.1 million random weights in the embedded engine
and one model call a session. Every third task is solved whatever the agent does; a session solves
another one if it prefers the lower third of the vocabulary. It prints the share of groups with a
signal in the groups that a step asks for (mean, and in the worst step), and sessions and seconds.
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from staleness import prefers_lower_third, write_config

from tugline.evaluators.base import SessionOutcome

HERE = Path(__file__).parent
GROUPS = 6


class Run(NamedTuple):
    """One run of ``tugline train``."""

    refill: bool
    staleness: int
    signal: list[float]
    """Groups with a signal of each step."""
    rounds: list[float]
    sessions: int
    wall_s: float
    passed: float
    """Held-out pass@1 at the end."""


def solves_every_third(outcome: SessionOutcome) -> float:
    """Return 1 for every third task, else whether the agent prefers the lower third."""
    number = re.search(r"train(\d+)-", outcome.calls[0].session)
    if number is not None and int(number[1]) % 3 == 0:
        return 1.0
    return prefers_lower_third(outcome)


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    runs: list[Run] = []
    for seed in options.seeds:  # the outer loop, so that changes of load affect all alike
        for staleness in options.staleness:
            for refill in (False, True):
                runs.append(train(staleness, seed, options.steps, refill=refill))
                print(json.dumps(runs[-1]._asdict()), file=sys.stderr)
    print_table(runs)


def train(staleness: int, seed: int, steps: int, *, refill: bool) -> Run:
    """Run ``tugline train`` in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, staleness, seed, steps, {"lr": 5e-3, "importance": "truncate"})
        config = json.loads((folder / "config.json").read_text())
        config["schedule"] |= {"tasks_per_step": GROUPS, "refill": refill}
        config["template"]["evaluator"]["options"]["target"] = "refill:solves_every_third"
        (folder / "config.json").write_text(json.dumps(config))
        command = [Path(sys.executable).with_name("tugline"), "train", "config.json"]
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--out", "run"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            sys.exit(done.stderr)
        wall_s = time.monotonic() - began
        state = json.loads((folder / "run" / "summary.json").read_text())["state"]
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rollout/signal" in row]
    return Run(
        refill,
        staleness,
        signal=[row["rollout/signal"] for row in rows],
        rounds=[row["rollout/rounds"] for row in rows],
        sessions=state["sessions"],
        wall_s=wall_s,
        passed=state["scores"][-1]["evaluation"]["pass_at"]["1"]["value"],
    )


def print_table(runs: list[Run]) -> None:
    """Print a row for each staleness, without and with refill, over all seeds."""
    print("| staleness | refill | signal (worst step) | rounds | sessions | wall s | s a signal |")
    print("|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((run.staleness, run.refill) for run in runs):
        own = [run for run in runs if (run.staleness, run.refill) == key]
        signal = [count for run in own for count in run.signal]
        rounds = [count for run in own for count in run.rounds]
        wall_s = sum(run.wall_s for run in own)
        print(
            f"| {key[0]} | {'yes' if key[1] else 'no'} | {sum(signal) / len(signal) / GROUPS:.0%}"
            f" ({min(signal) / GROUPS:.0%}) | {sum(rounds) / len(rounds):.1f}"
            f" | {sum(run.sessions for run in own) / len(own):.0f} | {wall_s / len(own):.0f}"
            f" | {wall_s / sum(signal):.2f} |"
        )


if __name__ == "__main__":
    main()
