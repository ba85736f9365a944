"""Asynchronous and synchronous training compared: learning and time.

``python benchmarks/training/staleness.py`` runs ``tugline train`` with the same configuration at
each bound on staleness and with each seed, and prints pass@1 on held-out tasks before and after,
with 95 % intervals, and wall-clock and CPU time. The model has 0.1 million random weights and runs
in the embedded engine; its task is to prefer the lower third of the vocabulary. Each agent makes
one model call and then sleeps in place of running tools. The time is log-normal, with a median of
0.6 and a 95th percentile of 3 seconds, so that a few sessions of each batch are much longer than
the others.
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tugline.demo.run import WARM_START
from tugline.estimates import wilson
from tugline.evaluators.base import SessionOutcome

HERE = Path(__file__).parent
VOCABULARY, TOKENS, WANTED = 1400, 12, 5
AGENT = """
import json, os, random, time, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": os.environ["TUGLINE_INSTRUCTION"]}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(
    url, json.dumps(body).encode(), headers | {"content-type": "application/json"}
)
urllib.request.urlopen(request).read()
tool_time = random.Random(os.environ["OPENAI_BASE_URL"].rpartition("/s/")[2])  # the session
time.sleep(min(8, tool_time.lognormvariate(-0.5, 1)))
"""


class Run(NamedTuple):
    """One run of ``tugline train``."""

    staleness: int
    seed: int
    first: int
    """Held-out sessions, out of `sessions`, that passed with the initial weights."""
    last: int
    """The same with the final weights."""
    sessions: int
    wall_s: float
    cpu_s: float
    """CPU time of the trainer and its child processes."""
    mean_staleness: float
    """Mean over all steps of the staleness of trained tokens, in versions."""


def prefers_lower_third(outcome: SessionOutcome) -> float:
    """Return 1 if at least five of the first twelve sampled ids are in the lower third, else 0."""
    ids = [int(token) for call in outcome.calls for token in call.sampled_ids][:TOKENS]
    return float(sum(token < VOCABULARY // 3 for token in ids) >= WANTED)


def main() -> None:
    """Run everything and print a table, or one JSON object per run with ``--json``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--grpo", type=json.loads, default={"lr": 5e-3, "importance": "truncate"})
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs: list[Run] = []
    for seed in options.seeds:  # the outer loop, so that changes of load affect all bounds alike
        for staleness in options.staleness:
            runs.append(train(staleness, seed, options.steps, options.grpo))
            print(json.dumps(runs[-1]._asdict()), file=None if options.json else sys.stderr)
    if not options.json:
        print_table(runs)


def train(staleness: int, seed: int, steps: int, grpo: dict[str, Any]) -> Run:
    """Run ``tugline train`` in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, staleness, seed, steps, grpo)
        command = [
            Path(sys.executable).with_name("tugline"),
            "train",
            "config.json",
            "--out",
            "run",
        ]
        env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        before = os.times()
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            sys.exit(done.stderr)
        after = os.times()
        state = json.loads((folder / "run" / "summary.json").read_text())["state"]
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ages = [
        row["rollout/staleness"] for row in map(json.loads, lines) if "rollout/staleness" in row
    ]
    rates = [score["evaluation"]["pass_at"]["1"] for score in state["scores"]]
    first, last = (round(one["value"] * one["tasks"]) for one in (rates[0], rates[-1]))
    return Run(
        staleness, seed, first, last, rates[0]["tasks"],
        wall_s=after.elapsed - before.elapsed,
        cpu_s=after.children_user + after.children_system
        - before.children_user - before.children_system,
        mean_staleness=sum(ages) / len(ages),
    )  # fmt: skip


def write_config(folder: Path, staleness: int, seed: int, steps: int, grpo: dict[str, Any]) -> None:
    """Write the model, the tasks, the agent and the configuration of a run."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    shutil.copy(WARM_START / "tokenizer.json", folder / "model")
    (folder / "agent.py").write_text(AGENT)

    def source(name: str, count: int) -> dict[str, Any]:
        rows = [{"id": f"{name}{i}", "question": f"Say {name} {i}."} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"path": f"{name}.jsonl", "id": "id", "instruction": "{question}"}
        return {"taskset": {"name": "jsonl", "options": options}}

    values = {
        "model": "model",
        "tasks": source("train", 64),
        "heldout": source("test", 48) | {"every": 1000},
        "template": {
            "harness": {
                "name": "shell",
                "options": {"command": [sys.executable, "-S", str(folder / "agent.py")]},
            },
            "runtime": {"name": "local"},
            "evaluator": {
                "name": "function",
                "options": {"target": "staleness:prefers_lower_third"},
            },
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": TOKENS},
        },
        "engine": {"renderer": "qwen3"},
        "node": {"slots": 32},
        "grpo": grpo,
        "schedule": {
            "steps": steps, "tasks_per_step": 4, "samples": 6, "staleness": staleness, "seed": seed,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))


def print_table(runs: list[Run]) -> None:
    """Print a row per bound; the sessions of all its seeds are pooled for the interval."""
    print("| staleness | mean | pass@1 before | pass@1 after | by seed | wall s | CPU s |")
    print("|---|---|---|---|---|---|---|")
    synchronous = sum(run.wall_s for run in runs if run.staleness == runs[0].staleness)
    for staleness in dict.fromkeys(run.staleness for run in runs):
        own = [run for run in runs if run.staleness == staleness]
        total, wall_s = sum(run.sessions for run in own), sum(run.wall_s for run in own)
        before, after = (_format(sum(passed), total) for passed in (
            [run.first for run in own], [run.last for run in own]
        ))  # fmt: skip
        seeds = ", ".join(f"{run.last / run.sessions:.0%}" for run in own)
        print(
            f"| {staleness} | {sum(run.mean_staleness for run in own) / len(own):.2f} | {before}"
            f" | {after} | {seeds} | {wall_s / len(own):.0f} ({wall_s / synchronous - 1:+.0%})"
            f" | {sum(run.cpu_s for run in own) / len(own):.0f} |"
        )


def _format(passed: int, total: int) -> str:
    low, high = wilson(passed, total)
    return f"{passed / total:.0%} ({low:.0%} to {high:.0%})"


if __name__ == "__main__":
    main()
