"""Learning of several real agents from one start policy, measured before and after GRPO.

Every run is ``tugline train`` on the demo's tasks: 200 held-out tasks before, a few steps, and the
same 200 tasks after, with the unmodified agent in a sandbox. All runs start from one policy of a
million weights that knows the tools of all agents (``tools/warm_start/rebuild.py --blocks``; made
here if it is missing, in about half an hour). Then each trained policy is evaluated with every
agent.

    python benchmarks/learn/run.py [--json] [--harness NAME...] [--seeds N...] [--plot FILE]

An interrupted run is resumed from its folder below ``--out``.
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tugline.demo.tasks import HELD_OUT_SEED
from tugline.estimates import wilson

ROOT = Path(__file__).resolve().parents[2]
HARNESSES = ("codex", "claude_code", "qwen_code", "pi")
PROGRAM = Path(sys.executable).with_name("tugline")
SESSIONS_AT_ONCE = 6
TURNS, ANSWER, WINDOW, AGENT_S = 6, 128, 32_768, 120


class Rate(NamedTuple):
    """Sessions that passed, with Wilson's 95 % interval."""

    passed: int
    tasks: int
    low: float
    high: float

    def __str__(self) -> str:
        """Format as a percentage with its interval."""
        return f"{self.passed / self.tasks:.1%} ({self.low:.1%} to {self.high:.1%})"


class TrainingRun(NamedTuple):
    """Figures of one run of ``tugline train``."""

    harness: str
    seed: int
    before: Rate
    after: Rate
    sessions: int
    """Of training and both evaluations."""
    failed: int
    updates: int
    max_abs_dlogprob: float | None
    """Largest difference between the recorded and the recomputed logprob of a trained token, in
    nats; None if no token was trained."""
    minutes: float

    @property
    def mismatch(self) -> str:
        """Format `max_abs_dlogprob`."""
        return "none" if self.max_abs_dlogprob is None else f"{self.max_abs_dlogprob:.1e}"

    @property
    def disjoint(self) -> bool:
        """Whether the intervals before and after do not overlap."""
        return self.before.high < self.after.low


def main() -> None:
    """Train each harness with each seed, evaluate each policy with each harness, print tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--harness", nargs="+", default=HARNESSES, choices=HARNESSES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8, help="GRPO steps")
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="sessions of one task")
    parser.add_argument("--heldout", type=int, default=200, help="tasks before and after")
    parser.add_argument("--cross", type=int, default=100, help="tasks of the second table; 0: none")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--policy", type=Path, help="start policy (default: one below --out)")
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="folder of all runs")
    parser.add_argument("--plot", type=Path, help="draw the first table into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    policy = (options.policy or make_policy(options.out / "policy", options.harness)).resolve()
    runs = []
    for seed in options.seeds:
        for harness in options.harness:
            runs.append(learn(harness, seed, policy, options))
            print(describe(runs[-1]), file=sys.stderr, flush=True)
    table = {
        one: {other: evaluate_with(one, other, options) for other in options.harness}
        for one in (options.harness if options.cross else ())
    }
    if options.plot:
        draw(runs, options.plot)
    if options.json:
        rows = [{**_nested(one), "disjoint": one.disjoint} for one in runs]
        cross = {one: {to: _nested(rate) for to, rate in row.items()} for one, row in table.items()}
        print(json.dumps({"runs": rows, "cross": cross}))
    else:
        print_tables(runs, table)


def make_policy(folder: Path, harnesses: tuple[str, ...]) -> Path:
    """Return the folder of the start policy; make the policy if it is missing."""
    if not (folder / "tokenizer.json").exists():
        command = [sys.executable, str(ROOT / "tools" / "warm_start" / "rebuild.py"), str(folder)]
        chosen = [argument for name in harnesses for argument in ("--harness", name)]
        _call([*command, "--blocks", *chosen], timeout=3 * 3600)
    return folder


def learn(harness: str, seed: int, policy: Path, options: argparse.Namespace) -> TrainingRun:
    """Run or resume ``tugline train`` unless it is complete; return its figures."""
    folder = options.out.resolve() / f"{harness}-{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        folder.mkdir(exist_ok=True)
        config = folder.with_suffix(".json")
        config.write_text(json.dumps(make_config(harness, seed, policy, options), indent=1))
        resume = ["--resume"] if (folder / "config.json").exists() else []
        _call([str(PROGRAM), "train", str(config), "--out", str(folder), *resume], timeout=7200)
    state = json.loads(summary.read_text())["state"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["update/mismatch/total/max_abs"] for row in lines if _compared(row)]
    scores = [score["evaluation"] for score in (state["scores"][0], state["scores"][-1])]
    before, after = (_rate(score["pass_at"].get("1")) for score in scores)
    return TrainingRun(
        harness, seed, before, after,
        sessions=state["sessions"] + state["failed"]
        + sum(one["attempts"] + one["unrewarded"] for one in scores),
        failed=state["failed"] + sum(one["unrewarded"] for one in scores),
        updates=state["updates"],
        max_abs_dlogprob=max(gaps, default=None),
        minutes=state["elapsed_s"] / 60,
    )  # fmt: skip


def make_config(
    harness: str, seed: int, policy: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the configuration of one run."""
    steps, tasks = options.steps, options.tasks_per_step
    return {
        "model": str(policy),
        "tasks": {"taskset": tasks_of("train", seed, steps * tasks)},
        "heldout": {
            "taskset": tasks_of("heldout", HELD_OUT_SEED, options.heldout), "every": steps,
        },
        "template": template(harness),
        "engine": {"renderer": "qwen3"},
        "window": WINDOW,
        "node": {"slots": SESSIONS_AT_ONCE},
        "grpo": {"lr": options.lr, "decay_updates": steps, "seed": seed},
        "schedule": {
            "steps": steps, "tasks_per_step": tasks, "samples": options.samples,
            "balance": "family", "seed": seed, "keep": 1,
        },
        "metrics": [{"name": "plots"}],
    }  # fmt: skip


def tasks_of(split: str, seed: int, count: int) -> dict[str, Any]:
    """Return the demo's task set."""
    options = {"split": split, "seed": seed, "count": count}
    return {"name": "tugline.demo.tasks:RepairTasks", "options": options}


def template(harness: str) -> dict[str, Any]:
    """Return the settings that all tasks share."""
    return {
        "harness": {"name": harness},
        "runtime": {"name": "bubblewrap"},
        "limits": {"agent_s": AGENT_S, "max_turns": TURNS},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": ANSWER},
    }


def evaluate_with(trained: str, harness: str, options: argparse.Namespace) -> Rate:
    """Evaluate the policy of `trained` and the first seed with `harness`."""
    model = options.out.resolve() / f"{trained}-{options.seeds[0]}" / "model"
    folder = options.out.resolve() / f"{trained}-with-{harness}"
    evaluation = folder / "evaluation.json"
    if not evaluation.exists():
        folder.mkdir(exist_ok=True)
        tasks = folder.with_suffix(".tasks.json")
        taskset = tasks_of("heldout", HELD_OUT_SEED, options.cross)
        tasks.write_text(json.dumps({"taskset": taskset, "template": template(harness)}))
        command = [str(PROGRAM), "eval", str(tasks), "--out", str(folder), "--model", str(model)]
        slots = ["--slots", str(SESSIONS_AT_ONCE)]
        _call([*command, "--renderer", "qwen3", *slots], timeout=3600)
    return _rate(json.loads(evaluation.read_text())["evaluation"]["pass_at"].get("1"))


def describe(run: TrainingRun) -> str:
    """Return a line with the figures of a run."""
    return (
        f"{run.harness}, seed {run.seed}: {run.before} -> {run.after}, {run.sessions} sessions,"
        f" {run.failed} failed, |dlogp| {run.mismatch}, {run.minutes:.1f} min"
    )


def print_tables(runs: list[TrainingRun], table: dict[str, dict[str, Rate]]) -> None:
    """Print both tables."""
    print("| harness | seed | before | after | gain | disjoint | sessions | failed | dlogp | min |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        gain = run.after.passed / run.after.tasks - run.before.passed / run.before.tasks
        print(
            f"| {run.harness} | {run.seed} | {run.before} | {run.after} | {100 * gain:.1f} points |"
            f" {'yes' if run.disjoint else 'no'} | {run.sessions} | {run.failed} |"
            f" {run.mismatch} | {run.minutes:.1f} |"
        )
    if table:
        print("\n| trained with | " + " | ".join(table) + " |")
        print("|---" * (len(table) + 1) + "|")
    for trained, row in table.items():
        print(f"| {trained} | " + " | ".join(str(rate) for rate in row.values()) + " |")


def draw(runs: list[TrainingRun], path: Path) -> None:
    """Draw pass@1 before and after as pairs of bars with intervals."""
    import matplotlib as mpl  # noqa: PLC0415 - only for this

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(1.6 + 1.1 * len(runs), 3.6))
    for number, run in enumerate(runs):
        for shift, rate, colour in ((-0.2, run.before, "0.7"), (0.2, run.after, "tab:blue")):
            share = rate.passed / rate.tasks
            low, high = max(0.0, share - rate.low), max(0.0, rate.high - share)
            axes.bar(number + shift, share, 0.38, color=colour)
            axes.errorbar(number + shift, share, [[low], [high]], color="black", capsize=3)
    axes.set_xticks(range(len(runs)), [f"{run.harness}\nseed {run.seed}" for run in runs])
    axes.set(ylim=(0, 1), ylabel="held-out pass@1", title="Before and after GRPO, by agent")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _rate(estimate: dict[str, Any] | None) -> Rate:
    if estimate is None:
        sys.exit("no session of an evaluation earned a reward; see its log.jsonl")
    tasks = estimate["tasks"]
    passed = round(estimate["value"] * tasks)
    return Rate(passed, tasks, *wilson(passed, tasks))


def _nested(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _nested(one) for name, one in value._asdict().items()}
    return value


def _compared(row: dict[str, Any]) -> bool:
    return "update/mismatch/total/max_abs" in row


def _call(command: list[str], *, timeout: float) -> None:
    """Run a program with its output on stderr. Exits if it fails."""
    began = time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, stdout=sys.stderr, env=env, timeout=timeout)
    if done.returncode:
        print(f"ended with code {done.returncode}: {' '.join(command)}", file=sys.stderr)
        sys.exit(1)
    print(f"{time.monotonic() - began:.0f} s: {' '.join(command)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
