"""Bias of `group.min_usable`, which keeps the samples of a group that finish first.

``python benchmarks/server/min_usable.py`` submits groups to a server (its real code, in this
process) and commits their samples in the order of simulated durations, until the server cancels the
rest. Durations are log-normal, with a given correlation between their logarithm and the reward. It
prints the mean reward of the usable samples less that of all samples of the same groups, with its
standard error over groups, and the share of groups that lost their training signal.
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from tugline.launch.server import open_control_plane
from tugline.protocol import HeldSession, LeaseRequest, NodeRegistration, Renewal, Work
from tugline.recording.trajectories import pack
from tugline.server.control import ControlPlane
from tugline.server.settings import ServerSettings
from tugline.types import Group, Ledger, PluginSpec, Reward, Status, Task, Trajectory

SAMPLES = 8
PASS = 0.5
"""Probability that a sample is solved."""


class Outcome(NamedTuple):
    """A group: mean reward of all samples and of the usable ones, and whether each has a signal."""

    whole: float
    kept: float
    signal: bool
    signal_kept: bool


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--min-usable", nargs="+", type=int, default=[6, 4])
    parser.add_argument("--correlation", nargs="+", type=float, default=[-0.5, -0.3, 0.0, 0.3])
    options = parser.parse_args()
    print("| correlation | min_usable | reward, all | reward, usable | bias | signal lost |")
    print("|---|---|---|---|---|---|")
    for least in options.min_usable:
        for correlation in options.correlation:
            groups = await measure(options.groups, least, correlation)
            gaps = [one.kept - one.whole for one in groups]
            lost = [one.signal and not one.signal_kept for one in groups]
            print(
                f"| {correlation} | {least} of {SAMPLES} | {fmean(g.whole for g in groups):.3f}"
                f" | {fmean(g.kept for g in groups):.3f} | {fmean(gaps):+.3f} +-"
                f" {stdev(gaps) / math.sqrt(len(gaps)):.3f} | {fmean(lost):.1%} |"
            )


async def measure(groups: int, least: int, correlation: float) -> list[Outcome]:
    """Run the groups on a new server."""
    chance = random.Random(f"{least}/{correlation}")
    with tempfile.TemporaryDirectory() as name:
        async with open_control_plane(ServerSettings(), Path(name)) as control:
            registration = NodeRegistration(name="node", slots=SAMPLES, capacity=SAMPLES)
            node = (await control.dispatcher.register(registration)).node
            return [
                await run_group(control, node, f"g{number}", least, draw(chance, correlation))
                for number in range(groups)
            ]


def draw(chance: random.Random, correlation: float) -> list[tuple[float, float]]:
    """Return the duration and the reward of each sample."""
    drawn = []
    for _ in range(SAMPLES):
        reward = float(chance.random() < PASS)
        standard = (reward - PASS) / math.sqrt(PASS * (1 - PASS))
        noise = math.sqrt(1 - correlation**2) * chance.gauss(0, 1)
        drawn.append((math.exp(correlation * standard + noise), reward))
    return drawn


async def run_group(
    control: ControlPlane, node: str, name: str, least: int, drawn: list[tuple[float, float]]
) -> Outcome:
    """Lease the samples of a group, and commit them by duration until the server stops the rest."""
    parts = {"harness": PluginSpec("shell", {"command": "true"}), "evaluator": PluginSpec("tests")}
    task = Task(id=name, instruction="?", samples=SAMPLES, group=Group(min_usable=least), **parts)
    await control.submit([task])
    held: dict[int, Work] = {}
    while len(held) < SAMPLES:
        leased = _hold(held)
        lease = LeaseRequest(held=leased, applied=0, capacity=SAMPLES - len(held), wait_s=5.0)
        orders = await control.dispatcher.lease(node, lease)
        held |= {work.session.sample: work for work in orders.work}
    rewards = [reward for _, reward in drawn]
    kept: list[float] = []
    for sample in sorted(held, key=lambda each: drawn[each][0]):
        renewed = await control.dispatcher.renew(node, Renewal(held=_hold(held), applied=0))
        stopped = {stop.session for stop in renewed.stop}
        work = held.pop(sample)
        reward = None if work.session.id in stopped else rewards[sample]
        status = Status.CANCELLED if reward is None else Status.COMPLETED
        result = Trajectory(
            session=work.session.id, task=name, sample=sample, status=status, traces=(),
            ledger=Ledger(), reward=None if reward is None else Reward(reward),
        )  # fmt: skip
        await control.dispatcher.commit(work.session.id, work.session.epoch, pack(result))
        kept += [] if reward is None else [reward]
    return Outcome(fmean(rewards), fmean(kept), len({*rewards}) > 1, len({*kept}) > 1)


def _hold(held: dict[int, Work]) -> tuple[HeldSession, ...]:
    sessions = [work.session for work in held.values()]
    return tuple(HeldSession(each.id, each.epoch, Status.RUN) for each in sessions)


if __name__ == "__main__":
    asyncio.run(main())
