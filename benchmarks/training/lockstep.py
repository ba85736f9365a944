"""Share of the ranks' time that is useful when they make their forward passes in lockstep.

    python benchmarks/training/lockstep.py [--sessions 64] [--median 26000] [--micro-tokens 65536]

A simulation: sessions of random lengths are divided into passes by the trainer's own code, and the
time of a pass is its estimated cost. Under FSDP2 the ranks gather each layer together, so a turn
takes as long as its most expensive pass. The useful share is the cost of all passes divided by the
ranks and the time of all turns. `tokens` is the former division: each rank gets the same number of
tokens, in the order of their prefixes, and makes its passes in that order.
"""

# ruff: noqa: INP001, T201 - a script that prints
import argparse
import json
import statistics
from collections.abc import Sequence

import numpy as np

from tugline.trainers.grpo.batch import Row, plain_sample
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.packing import Costs, divide

MODEL = Costs(token=2 * 6.95e9, pair=4 * 32 * 128 * 36, trained=2 * 151_936 * 4096)
"""Qwen3 of 8 billion weights: 36 layers, 32 heads of 128, hidden size 4,096."""


def make_rows(rng: np.random.Generator, sessions: int, median: int, limit: int) -> list[Row]:
    """Return a trace for each session; the 16 sessions of a task share their first 4,000 ids."""
    rows = []
    for number in range(sessions):
        if number % 16 == 0:
            prompt = rng.integers(0, 100_000, 4_000)
        length = int(np.clip(rng.lognormal(np.log(median), 0.6), 5_000, limit))
        ids = np.concatenate((prompt, rng.integers(0, 100_000, length - len(prompt))))
        mask = np.zeros(length, np.bool_)
        mask[len(prompt) :] = rng.random(length - len(prompt)) < 0.3
        rows.append(Row(plain_sample(ids.astype(np.int32), mask, session=str(number))))
    return rows


def divide_by_tokens(
    rows: Sequence[Row], config: GrpoConfig, costs: Costs, world: int
) -> list[list[list[Row]]]:
    """Give each rank the same number of tokens, and make passes of these."""
    ordered = sorted(rows, key=lambda row: row.order)
    total = sum(row.length for row in ordered)
    parts: list[list[Row]] = [[] for _ in range(world)]
    before = 0
    for row in ordered:
        parts[world * (2 * before + row.length) // (2 * total)].append(row)
        before += row.length
    own = []
    for part in parts:
        passes = [turn[0] for turn in divide(part, config, costs, 1)]
        passes.sort(key=lambda chosen: chosen[0].order)
        own.append(passes)
    turns = max(map(len, own))
    return [[passes[n] if n < len(passes) else [] for passes in own] for n in range(turns)]


def measure(turns: Sequence[Sequence[Sequence[Row]]], costs: Costs, world: int) -> float:
    """Return the useful share of the ranks' time."""
    times = [[costs.estimate(part, tree=True) if part else 0.0 for part in turn] for turn in turns]
    return sum(map(sum, times)) / (world * sum(map(max, times)))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Useful share of lockstep time (simulated).")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--median", type=int, default=26_000, help="median tokens of a session")
    parser.add_argument("--micro-tokens", type=int, default=65_536)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    config = GrpoConfig(micro_tokens=options.micro_tokens, tree_packing=True)
    shares: dict[str, dict[int, list[float]]] = {"tokens": {}, "cost": {}}
    for draw in range(options.draws):
        rng = np.random.default_rng(draw)
        rows = make_rows(rng, options.sessions, options.median, options.micro_tokens)
        for world in (4, 8):
            for name, method in (("tokens", divide_by_tokens), ("cost", divide)):
                share = measure(method(rows, config, MODEL, world), MODEL, world)
                shares[name].setdefault(world, []).append(share)
    if options.json:
        print(json.dumps(shares))
        return
    print(f"useful share, simulated: mean of {options.draws} draws (least, greatest)")
    for name, by_world in shares.items():
        for world, values in by_world.items():
            print(
                f"{world} ranks, divided by {name:<6} {statistics.mean(values):.2f}"
                f" ({min(values):.2f}, {max(values):.2f})"
            )


if __name__ == "__main__":
    main()
