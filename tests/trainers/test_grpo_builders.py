"""Trace builders change the cost of a training step, not its result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from support.calls import make_call
from support.random_sessions import session as draw_session
from trainers.sessions import captured, session, tiny, weights
from tugline.config import from_mapping
from tugline.plugins import find, list_names
from tugline.trainers.grpo.config import Estimator, GrpoConfig, Normalisation
from tugline.trainers.grpo.samples import prepare
from tugline.trainers.grpo.tokens import token_weights
from tugline.trainers.grpo.train import Grpo
from tugline.types import Call, Reward, Sample, Sampling, Trajectory

BUILDERS = [name for name in list_names("builder") if ":" not in name]
CREDITS = [
    {"credit": "session"},
    {"credit": "call"},
    {"credit": "trace"},
    {"credit": "return", "turn_discount": 0.7},
    {"credit": "return", "malformed": "mask", "truncated": "penalise", "repeated": "penalise"},
]


@st.composite
def groups(draw: DrawFn) -> list[tuple[list[Call], float]]:
    """Sessions of a group, sampled at several temperatures, and their rewards."""
    group = []
    for number in range(draw(st.integers(1, 4))):
        calls = draw_session(draw(st.binary(min_size=150, max_size=150)), f"s{number}").calls
        at = [Sampling(temperature=(None, 0.5, 1.0)[call.number % 3]) for call in calls]
        calls = [replace(call, sampling=sampling) for call, sampling in zip(calls, at, strict=True)]
        group.append((calls, draw(st.sampled_from([0.0, 0.1, 0.3, 1.0]))))
    return group


def build(
    group: Sequence[tuple[list[Call], float]], builder: str, limit: int | None = None
) -> list[Trajectory]:
    """Trajectories of the group with this builder, of at most `limit` tokens a trace."""
    made = []
    for i, (calls, outcome) in enumerate(group):
        traces, ledger, _ = find("builder", builder)(max_length=limit).build(calls)
        done = session(traces, task="t", sample=i, reward=outcome)
        reward = Reward(outcome, per_call={call.number: call.number % 3 / 4 for call in calls})
        made.append(replace(done, session=calls[0].session, ledger=ledger, reward=reward))
    return made


def tokens(
    samples: Sequence[Sample], weights: Sequence[float]
) -> list[tuple[str, float, float, float, float]]:
    """Every trained token: session, log probability, advantage, temperature and weight."""
    return sorted(
        (
            row.session,
            *(float(values[at]) for values in (row.logprobs, row.advantages, row.temperatures)),
            weight,
        )
        for row, weight in zip(samples, weights, strict=True)
        for at in np.flatnonzero(row.loss_mask)
    )


@pytest.mark.parametrize("credit", CREDITS, ids=lambda case: case["credit"])
@given(
    group=groups(),
    advantage=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    normalisation=st.sampled_from(["token", "sequence", "constant"]),
    stale=st.sampled_from([None, 1]),
    limit=st.sampled_from([None, 9]),
)
def test_builders_give_tokens_the_same_weight(
    credit: dict[str, object],
    group: list[tuple[list[Call], float]],
    advantage: Estimator,
    normalisation: Normalisation,
    stale: int | None,
    limit: int | None,
) -> None:
    """Tokens, advantages, weights and the ledger are exactly the same."""
    chosen = {"advantage": advantage, "normalisation": normalisation, "max_staleness": stale}
    config = from_mapping(credit | chosen, GrpoConfig)
    seen, ledgers, orders = [], [], []
    for builder in BUILDERS:
        batch = build(group, builder, limit)[:: -1 if ledgers else 1]  # in any order
        samples, ledger = prepare(batch, config, version=5)
        seen.append(tokens(samples, token_weights(samples, config) if samples else []))
        ledgers.append(ledger)
        orders.append(list(dict.fromkeys(sample.session for sample in samples)))
    assert all(other == seen[0] for other in seen)
    assert all(other == ledgers[0] for other in ledgers)
    assert all(other == orders[0] for other in orders)
    assert len(seen[0]) == ledgers[0].trained


@given(group=groups(), advantage=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_rewards_per_trace_do_not_depend_on_the_builder(
    group: list[tuple[list[Call], float]], advantage: Estimator
) -> None:
    """A merged trace's reward, or the same for each of its calls, gives the same advantages."""
    merged, single = build(group, "prefix_merging"), build(group, "per_request")
    of_call = {
        (done.session, span.call): float(index) / 3
        for done in merged
        for index, trace in enumerate(done.traces)
        for span in trace.spans
    }
    seen = []
    for batch in (merged, single):
        rewarded = [replace(done, reward=reward_traces(done, of_call)) for done in batch]
        config = GrpoConfig(credit="trace", advantage=advantage)
        samples, _ = prepare(rewarded, config, version=2)
        seen.append(tokens(samples, [1.0] * len(samples)))
    assert seen[0] == seen[1]


def reward_traces(trajectory: Trajectory, of_call: dict[tuple[str, int], float]) -> Reward:
    """Rewards of the traces by their first call; nan for a trace without calls."""
    numbers = [
        next((of_call[trajectory.session, span.call] for span in trace.spans), math.nan)
        for trace in trajectory.traces
    ]
    return Reward(9.0, per_trace=tuple(numbers))


def make_group(model: torch.nn.Module) -> list[tuple[list[Call], float]]:
    """Four sessions of five turns with an edit after the third, as captured from `model`."""
    rng = np.random.default_rng(3)
    group = []
    for i in range(4):
        calls: list[Call] = []
        prompt = rng.integers(0, 48, 20)
        for number in range(5):
            sampled = rng.integers(0, 48, 4)
            whole = np.concatenate((prompt, sampled))
            known = {"parent": number - 1 if number else None, "session": f"s{i}"}
            logprobs = captured(model, whole)[len(prompt) :]
            calls.append(make_call(number, prompt, sampled, logprobs=logprobs, **known))
            prompt = np.concatenate((whole, rng.integers(0, 48, 3)))
            prompt[10] = (prompt[10] + (number == 2)) % 48
        group.append((calls, float(i % 2)))
    return group


@pytest.mark.parametrize("credit", CREDITS, ids=lambda case: case["credit"])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_builders_give_the_same_gradient(
    credit: dict[str, object], normalisation: Normalisation
) -> None:
    """A step of two updates gives the same weights; it costs less with merged traces."""
    knobs = {"normalisation": normalisation, "sessions_per_update": 2, "lr": 1e-3}
    config = from_mapping(credit | knobs | {"tree_packing": False}, GrpoConfig)
    trained, cost = {}, {}
    for builder in BUILDERS:
        model = tiny()
        report = Grpo(model, config).step(build(make_group(tiny()), builder), version=3)
        assert report.updates == 2
        trained[builder], cost[builder] = weights(model), report.tokens_forwarded
    first, *others = trained.values()
    assert max(float((other - first).abs().max()) for other in others) < 1e-5
    assert cost["prefix_merging"] < 0.6 * cost["per_request"]
