"""Bias of policy gradients with rewards of calls, on a stopping problem: a simulated study.

``python benchmarks/training/credit.py`` prints the bias of each estimator. A policy with one
parameter, the log-odds to go on, chooses at each turn to go on or to stop, which ends the session,
as does the last turn. Both choices have a reward, so the expected return and its gradient are
known. Advantages of ``ours`` are those of the trainer's own code (`prepare`), and no model is
needed. Those of a turn index are ``r_t`` less the mean of ``r_t`` over the group's sessions that
have a turn ``t``, summed from each turn to the session's last one (verl issue 7244), with the
session itself in the mean, or without.
"""

# ruff: noqa: INP001, T201 - a script that prints and simulates
from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.samples import prepare
from tugline.types import Ledger, Reward, Span, Status, Trace, Trajectory

TURNS = 5
"""Maximum number of turns of a session."""
REWARDS = (1.0, 0.4)
"""Rewards of stopping and of going on."""
LOG_ODDS = 0.5
GROUP = 4
"""Number of sessions in a group."""


class Bias(NamedTuple):
    """Difference of an estimator's mean and the gradient, over seeds."""

    estimator: str
    mean: float
    error: float
    """Standard error of the mean."""
    deviation: float
    """Standard deviation of the estimate of one group."""


def compute_gradient() -> float:
    """Return the derivative of the expected return by the log-odds."""
    go = 1 / (1 + math.exp(-LOG_ODDS))
    stop_reward, go_reward = REWARDS
    mean = (1 - go) * stop_reward + go * go_reward
    slope = sum(
        (t * go ** (t - 1) * mean if t else 0.0) + go**t * (go_reward - stop_reward)
        for t in range(TURNS)
    )
    return slope * go * (1 - go)


def draw_session(rng: np.random.Generator) -> list[int]:
    """Draw the choices of a session: 1 to go on, 0 to stop."""
    choices: list[int] = []
    while len(choices) < TURNS and 0 not in choices:
        choices.append(int(rng.random() < 1 / (1 + math.exp(-LOG_ODDS))))
    return choices


def make_trajectory(choices: Sequence[int], group: int, sample: int) -> Trajectory:
    """Make a session with a call for each choice, whose answer is one token."""
    count = len(choices)
    ids = np.full(2 * count, 2, np.int32)
    ids[1::2] = choices
    mask = np.arange(2 * count) % 2 == 1
    trace = Trace(
        ids=ids,
        mask=mask,
        logprobs=np.where(mask, -1, 0).astype(np.float32),
        spans=tuple(Span(turn, 2 * turn + 1, 2 * turn + 2, 0) for turn in range(count)),
    )
    rewards = [REWARDS[choice] for choice in choices]
    return Trajectory(
        session=f"{group}-{sample}",
        task=str(group),
        sample=sample,
        status=Status.COMPLETED,
        traces=(trace,),
        ledger=Ledger(sampled=count, trained=count),
        reward=Reward(sum(rewards), per_call=dict(enumerate(rewards))),
    )


# --------------------------------------------------------------------------- estimators
def estimate_ours(groups: Sequence[Sequence[list[int]]], credit: str, advantage: str) -> np.ndarray:
    """Return the gradient of each group by the trainer's advantages."""
    trajectories = [
        make_trajectory(choices, number, sample)
        for number, group in enumerate(groups)
        for sample, choices in enumerate(group)
    ]
    config = GrpoConfig(credit=credit, advantage=advantage)
    samples, _ = prepare(trajectories, config, version=0)
    gradients = np.zeros(len(groups))
    for each in samples:
        choices = each.input_ids[each.loss_mask]
        gradients[int(each.group)] += score(choices) @ each.advantages[each.loss_mask] / GROUP
    return gradients * (GROUP / (GROUP - 1) if advantage == "dr_grpo" else 1)


def estimate_by_index(groups: Sequence[Sequence[list[int]]], *, others: bool) -> np.ndarray:
    """Return the gradient of each group with means over the sessions that have a turn."""
    gradients = np.zeros(len(groups))
    for number, group in enumerate(groups):
        rewards = [np.array([REWARDS[choice] for choice in choices]) for choices in group]
        for own, choices in zip(rewards, group, strict=True):
            centred = own.copy()
            for turn in range(len(own)):
                at = [r[turn] for r in rewards if len(r) > turn and not (others and r is own)]
                centred[turn] -= np.mean(at) if at else 0.0
            advantages = np.cumsum(centred[::-1])[::-1]
            gradients[number] += score(np.array(choices)) @ advantages / GROUP
    return gradients


def score(choices: np.ndarray) -> np.ndarray:
    """Return the derivative of each choice's log probability by the log-odds."""
    return np.asarray(choices - 1 / (1 + math.exp(-LOG_ODDS)))


def measure(seeds: int, groups: int) -> list[Bias]:
    """Return the bias of each estimator over `seeds`, with this number of groups each."""
    estimates: dict[str, list[np.ndarray]] = {}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        drawn = [[draw_session(rng) for _ in range(GROUP)] for _ in range(groups)]
        for name, made in (
            ("turn index", estimate_by_index(drawn, others=False)),
            ("turn index, others only", estimate_by_index(drawn, others=True)),
            ("ours: return, rloo", estimate_ours(drawn, "return", "rloo")),
            ("ours: return, dr_grpo", estimate_ours(drawn, "return", "dr_grpo")),
            ("ours: session, rloo", estimate_ours(drawn, "session", "rloo")),
        ):
            estimates.setdefault(name, []).append(made)
    gradient = compute_gradient()
    biases = []
    for name, by_seed in estimates.items():
        means = np.array([each.mean() for each in by_seed]) - gradient
        error = float(means.std(ddof=1)) / math.sqrt(seeds)
        biases.append(Bias(name, float(means.mean()), error, float(np.concatenate(by_seed).std())))
    return biases


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--groups", type=int, default=4000, help="groups for each seed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    biases = measure(given.seeds, given.groups)
    if given.json:
        print(msgspec.json.encode([each._asdict() for each in biases]).decode())
        return
    print(f"gradient {compute_gradient():.4f}; {given.seeds} seeds of {given.groups} groups")
    print("estimator                  bias     error   bias/error  deviation of a group")
    for name, mean, error, deviation in biases:
        print(f"{name:25} {mean:+.4f}  {error:.4f}  {mean / error:+8.1f}    {deviation:.3f}")


if __name__ == "__main__":
    main()
