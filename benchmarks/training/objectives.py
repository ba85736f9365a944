"""Held-out pass@1 after training with several objectives, over seeds, at an equal budget.

Every run is ``tugline demo`` from the same start policy, with the small agent of the tutorial
(`docs/start/train-your-agent.md`), which costs less CPU than pi. A step has several updates, so
that the objectives differ: in the first update of a step all probability ratios are 1. Everything
but the objective is the same, and nothing is tuned for one of them.

    python benchmarks/training/objectives.py [--seeds 5] [--out DIR] [--json]

An interrupted run is resumed from its folder below ``--out``. Intervals over seeds are Student's.
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("tugline")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "CISPO": {"loss": "cispo"},
    "GSPO": {"ratio_level": "trace", "clip_low": 3e-4, "clip_high": 4e-4},
    "DPPO (TV)": {"loss": "dppo_tv"},
    "MaxRL": {"advantage": "max_rl"},
}
"""Settings that differ from the defaults, by name; those of GSPO are of its paper."""
UPDATES = {"lr": 2e-4, "sessions_per_update": 16, "decay_updates": 18}
"""Settings of all runs: three updates in each of the six steps."""
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""97.5 % quantile of Student's distribution, by number of seeds."""


class Outcome(NamedTuple):
    """Figures of one run."""

    before: float
    """pass@1 on the held-out tasks."""
    after: float
    updates: int
    mismatch: float
    """Largest difference between captured and recomputed logprobs, nats."""
    failed: int


def read_agent() -> str:
    """Return the agent of the tutorial."""
    text = (ROOT / "docs/start/train-your-agent.md").read_text()
    found = re.search(r'```python title="agent.py"\n(.*?)```', text, re.DOTALL)
    if found is None:
        raise SystemExit("the tutorial has no agent.py")
    return found[1]


def run(name: str, seed: int, out: Path) -> Outcome:
    """Run or resume one training run, or read its result."""
    folder = out / f"{re.sub(r'[^a-z]', '', name.lower())}-{seed}"
    summary = folder / "run" / "summary.json"
    if not summary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent.py").write_text(read_agent())
        settings = {
            "harness": "shell",
            "command": f"{sys.executable} {folder.absolute() / 'agent.py'}",
            "minutes": 600.0,
            "grpo": UPDATES | OBJECTIVES[name],
        }
        config = folder / "demo.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [PROGRAM, "demo", "--config", config, "--seed", str(seed)]
        command += ["--resume" if (folder / "run").exists() else "--out", folder / "run"]
        with (folder / "log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    figures = json.loads(summary.read_bytes())
    state = figures["state"]
    failed = state["failed"] + sum(each["evaluation"]["unrewarded"] for each in state["scores"])
    return Outcome(
        figures["before"]["value"],
        figures["after"]["value"],
        state["updates"],
        figures["replay_max_abs_dlogprob"],
        failed,
    )


def estimate(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    if len(values) < 2:
        return values[0], math.nan
    width = _STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), width


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(_STUDENT))
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, list[Outcome]] = {name: [] for name in OBJECTIVES}
    for seed in range(options.seeds):  # so that an interrupted table has equal seeds
        for name, outcomes in rows.items():
            outcomes.append(run(name, seed, options.out))
            print(name, seed, outcomes[-1], file=sys.stderr, flush=True)
    if options.json:
        print(msgspec.json.encode({n: [o._asdict() for o in each] for n, each in rows.items()}))
        return
    print("| objective | before | after, by seed | mean after (95 %) | gain over GRPO (paired) |")
    print("|---|---|---|---|---|")
    for name, outcomes in rows.items():
        after = [each.after for each in outcomes]
        mean, width = estimate(after)
        gains = [each - base.after for each, base in zip(after, rows["GRPO"], strict=True)]
        gain, around = estimate(gains)
        before = statistics.mean(each.before for each in outcomes)
        seeds = ", ".join(f"{value:.0%}" for value in after)
        compared = "" if name == "GRPO" else f"{100 * gain:+.1f} (± {100 * around:.1f}) points"
        print(
            f"| {name} | {before:.0%} | {seeds} | {mean:.1%} (± {100 * width:.1f}) | {compared} |"
        )


if __name__ == "__main__":
    main()
