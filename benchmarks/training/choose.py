"""Groups chosen by pass rate against a fixed order: a simulated study.

``python benchmarks/training/choose.py`` chooses tasks of the demo with the code of ``tugline
train`` and simulates the policy, without a model or an agent. A task's sessions pass with a
probability whose initial log-odds are normally distributed. Each group with a signal (not all
sessions have the same reward) raises the log-odds of all tasks of its family. A gain of 0 shows the
effect of the choice without learning. With a spread of 3, initially 31 % of sessions pass and half
of the groups have a signal, about as in the demo.
"""

# ruff: noqa: INP001, T201 - a script that prints and simulates
from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec

from tugline.demo.run import DemoSettings, make_config
from tugline.trainers.batches import TaskBatches
from tugline.types import Ledger, Reward, Status, Trajectory

MEAN = -1.7
"""Mean of the initial log-odds."""


class Setting(NamedTuple):
    """One row of the table."""

    tasks: int
    spread: float
    """Standard deviation of the initial log-odds."""
    gain: float
    """Increase of a family's log-odds for each group with a signal."""
    staleness: int = 0


class Outcome(NamedTuple):
    """One simulated run."""

    signal: float
    """Share of groups with a signal, not counting the first pass over the tasks."""
    passed: float
    """Mean pass probability of all tasks at the end."""


SETTINGS = (
    Setting(48, 1.5, 0.0),
    Setting(48, 3.0, 0.0),
    Setting(48, 3.0, 0.0, staleness=2),
    Setting(48, 3.0, 0.2),
    Setting(48, 3.0, 0.2, staleness=2),
    Setting(12, 3.0, 0.0),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    if options.steps < 10:
        parser.error(f"--steps is {options.steps}, must be at least 10: the first 8 are one epoch")
    print(
        "| tasks | spread | gain | staleness | signal, order | signal, pass_rate | passed at end |"
    )
    print("|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        means = {
            choose: average([simulate(setting, choose, seed, options.steps)
                             for seed in range(options.seeds)])
            for choose in ("order", "pass_rate")
        }  # fmt: skip
        order, rated = means["order"], means["pass_rate"]
        print(
            f"| {setting.tasks} | {setting.spread} | {setting.gain} | {setting.staleness}"
            f" | {order.signal:.0%} | {rated.signal:.0%} ({rated.signal / order.signal - 1:+.0%})"
            f" | {order.passed:.0%}, {rated.passed:.0%} |"
        )


def average(outcomes: list[Outcome]) -> Outcome:
    """Return the mean over seeds."""
    return Outcome(*(sum(values) / len(values) for values in zip(*outcomes, strict=True)))


def simulate(setting: Setting, choose: str, seed: int, steps: int) -> Outcome:
    """Run the schedule with simulated sessions."""
    settings = DemoSettings(steps=setting.tasks // 6, seed=seed)
    config = make_config(settings)
    schedule = msgspec.structs.replace(config.schedule, choose=choose)
    batches = TaskBatches(msgspec.structs.replace(config, schedule=schedule), Path())
    source = random.Random(f"{seed}")
    odds = [source.gauss(MEAN, setting.spread) for _ in batches.trained]
    families = [task.tags["family"] for task in batches.trained]
    chosen: dict[int, tuple[int, ...]] = {}
    learned: defaultdict[str, float] = defaultdict(float)
    rates: dict[int, float] = {}
    later, first = [], math.ceil(setting.tasks / schedule.tasks_per_step)

    def solve(number: int) -> float:
        return 1 / (1 + math.exp(-odds[number] - learned[families[number]]))

    for step in range(1, steps + 1):
        for ahead in range(step, step + setting.staleness + 1):
            chosen.setdefault(ahead, batches.choose(ahead, rates))
        tasks = batches.batch((step - 1) * schedule.tasks_per_step, chosen[step])
        groups = {task.id: n for task, n in zip(tasks, chosen[step], strict=True)}
        results = [
            finish(task, sample, passed=source.random() < solve(number))
            for task, number in groups.items()
            for sample in range(schedule.samples)
        ]
        rates = batches.update_rates(rates, groups, results)
        for task, number in groups.items():
            mixed = (
                len({one.reward.value for one in results if one.task == task and one.reward}) > 1
            )
            learned[families[number]] += setting.gain * mixed
            if step > first:
                later.append(mixed)
    ends = [solve(number) for number in range(len(odds))]
    return Outcome(sum(later) / len(later), sum(ends) / len(ends))


def finish(task: str, sample: int, *, passed: bool) -> Trajectory:
    """Return the result of a simulated session."""
    return Trajectory(
        session=f"{task}.{sample}", task=task, sample=sample, status=Status.COMPLETED, traces=(),
        ledger=Ledger(), reward=Reward(float(passed)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
