"""Credit of calls, special calls, and terms of rewards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec.structs import replace

from support.random_sessions import session as draw_session
from trainers.sessions import VERSION, tiny
from trainers.sessions import groups as make_groups
from tugline.errors import CaptureError
from tugline.plugins import find
from tugline.trainers.grpo.advantage import grade
from tugline.trainers.grpo.config import CREDITS, ESTIMATORS, GrpoConfig
from tugline.trainers.grpo.credit import SessionCalls, assign
from tugline.trainers.grpo.samples import prepare, read_group
from tugline.trainers.grpo.shaping import reward_efficiency
from tugline.trainers.grpo.train import Grpo
from tugline.types import (
    Ledger,
    Reason,
    Reward,
    Sample,
    Span,
    SpentLimit,
    Status,
    Trace,
    TraceKind,
    Trajectory,
)


def make_trace(
    calls: Mapping[int, int], kind: TraceKind = TraceKind.MAIN, **marks: object
) -> Trace:
    """A trace with these numbers of sampled tokens by call, each after a token of context."""
    spans, end = [], 0
    for call, count in calls.items():
        spans.append(Span(call, end + 1, end + 1 + count, VERSION, **marks))  # type: ignore[arg-type]
        end += 1 + count
    mask = np.zeros(end, np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    logprobs = np.where(mask, -0.5, 0).astype(np.float32)
    ids = np.arange(end, dtype=np.int32)
    return Trace(ids=ids, mask=mask, logprobs=logprobs, spans=tuple(spans), kind=kind)


def make_session(*traces: Trace, sample: int = 0, reward: Reward, **fields: object) -> Trajectory:
    """A finished session of the task ``t`` with these traces."""
    trained = sum(each.trained for each in traces)
    return Trajectory(
        session=f"t-{sample}",
        task="t",
        sample=sample,
        status=Status.COMPLETED,
        traces=traces,
        ledger=Ledger(sampled=trained, trained=trained),
        reward=reward,
        **fields,  # type: ignore[arg-type]
    )


def advantages_by_call(samples: Sequence[Sample], session: Trajectory) -> dict[int, float]:
    """The advantage of each call; all of its tokens have the same."""
    values: dict[int, float] = {}
    own = [each for each in samples if each.session == session.session]
    for row, trace in zip(own, session.traces, strict=True):
        for span in trace.spans:
            (values[span.call],) = set(row.advantages[span.start : span.end].tolist())
    return values


# --------------------------------------------------------------------------- rules
TREE = (
    make_trace({0: 2, 3: 1}),
    make_trace({1: 3, 2: 1}, TraceKind.SUBAGENT),
    make_trace({5: 2}, TraceKind.COMPACTION),
)
"""The main conversation, a sub-agent, and what follows a compaction; call 4 has no tokens."""
PER_CALL = {0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0, 4: 16.0, 5: 32.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.5] * 5),
        ({"credit": "trace"}, [0.1, 0.2, 0.2, 0.1, 0.3]),
        ({"credit": "call"}, [1, 2, 4, 8, 32]),
        ({"credit": "return"}, [63, 62, 60, 56, 32]),
        ({"credit": "return", "turn_discount": 0.5}, [8, 14, 24, 40, 32]),
    ],
)
def test_rules_give_each_call_a_reward(config: dict[str, object], expected: list[float]) -> None:
    """In the order of calls over all traces; a call without tokens counts in the sums."""
    reward = Reward(0.5, per_trace=(0.1, 0.2, 0.3), per_call=PER_CALL)
    calls = SessionCalls.of(make_session(*TREE, reward=reward))
    assert calls.numbers.tolist() == [0, 1, 2, 3, 5]
    assert calls.traces.tolist() == [0, 1, 1, 0, 2]
    assert calls.tokens.tolist() == [2, 3, 1, 1, 2]
    assert assign(calls, GrpoConfig(**config)).tolist() == expected  # type: ignore[arg-type]


def test_each_earlier_turn_is_discounted_once_more() -> None:
    """Traces with the same call have one turn, and masked calls have none."""
    masked = make_trace({5: 2}, masked=Reason.SIDE_CALL)
    traces = [make_trace({number: 2}) for number in (4, 0, 9, 4)]
    silent = replace(masked, mask=np.zeros_like(masked.mask))
    calls = SessionCalls.of(make_session(*traces, silent, reward=Reward(1.0)))
    assert calls.numbers.tolist() == [0, 4, 4, 5, 9]
    rewards = assign(calls, GrpoConfig(credit="return", turn_discount=0.5))
    assert rewards[calls.tokens > 0].tolist() == [0.25, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_sessions_without_rewards_of_calls_have_their_outcome(credit: str, advantage: str) -> None:
    """Every rule then gives exactly the advantages of `session`."""
    batch = make_groups(tiny())
    config = GrpoConfig(advantage=advantage)
    wanted, _ = prepare(batch, config, version=VERSION)
    got, _ = prepare(batch, replace(config, credit=credit), version=VERSION)
    for row, other in zip(got, wanted, strict=True):
        assert row.advantages.tobytes() == other.advantages.tobytes()


@pytest.mark.parametrize("credit", ["call", "return"])
@pytest.mark.parametrize(
    ("per_call", "error"),
    [
        ({0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}, "reward.per_call has 4 values, but none for call 5"),
        (PER_CALL | {4: math.nan}, r"reward.per_call\[4\] is nan, must be a finite number"),
    ],
)
def test_rewards_that_do_not_fit_the_calls_are_refused(
    credit: str, per_call: dict[int, float], error: str
) -> None:
    """The error names the session."""
    wrong = make_session(*TREE, reward=Reward(0.5, per_call=per_call))
    with pytest.raises(CaptureError, match=f"session t-0: {error}"):
        prepare([wrong], GrpoConfig(credit=credit), version=VERSION)
    prepare([wrong], GrpoConfig(), version=VERSION)


# --------------------------------------------------------------------------- no bias
GO = 0.6
"""Probability to go on."""


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("advantage", ["rloo", "dr_grpo"])
@pytest.mark.parametrize(
    ("credit", "discount"), [("session", None), ("return", None), ("return", 0.7)]
)
def test_the_expected_gradient_is_exact(
    credit: str, advantage: str, discount: float | None, *, split: bool
) -> None:
    """Summed over all groups of three sessions, it is that of the expected return.

    A session of up to three turns goes on or stops at each; calls may have traces of their own.
    """
    config = GrpoConfig(credit=credit, advantage=advantage, turn_discount=discount)
    factor = 1.0 if discount is None else discount
    chances = {(0,): 1 - GO, (1, 0): GO * (1 - GO), (1, 1, 0): GO**2 * (1 - GO), (1, 1, 1): GO**3}
    rewards = {0: 1.0, 1: -0.2}
    wanted = 0.0
    for choices, chance in chances.items():
        for turn, choice in enumerate(choices):
            later = sum(factor**n * rewards[c] for n, c in enumerate(choices[turn:]))
            wanted += chance * (choice - GO) * later
    got = 0.0
    for group in itertools.product(chances, repeat=3):
        members = []
        for sample, choices in enumerate(group):
            sizes = {turn: turn + 1 + choice for turn, choice in enumerate(choices)}
            parts = [{turn: size} for turn, size in sizes.items()] if split else [sizes]
            earned = {turn: rewards[choice] for turn, choice in enumerate(choices)}
            reward = Reward(sum(earned.values()), per_call=earned)
            members.append(make_session(*map(make_trace, parts), sample=sample, reward=reward))
        samples, _ = prepare(members, config, version=VERSION)
        chance = math.prod(chances[choices] for choices in group)
        for choices, member in zip(group, members, strict=True):
            for turn, own in advantages_by_call(samples, member).items() if samples else ():
                got += chance * (choices[turn] - GO) * own / len(group)
    assert got * (3 / 2 if advantage == "dr_grpo" else 1) == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted) > 0.05


# --------------------------------------------------------------------------- special calls
MARKS = {
    "malformed": {"malformed": True},
    "truncated": {"truncated": True},
    "repeated": {"repeats": 2},
}


@pytest.mark.parametrize("kind", MARKS)
def test_special_calls_are_masked_or_penalised(kind: str) -> None:
    """Masked ones are counted under their reason; a penalty is that of the call alone."""
    special = make_trace({0: 2}, **MARKS[kind])
    batch = [
        make_session(make_trace({0: 2, 1: 3}), sample=0, reward=Reward(1.0)),
        make_session(special, make_trace({1: 4}), sample=1, reward=Reward(0.0)),
    ]
    config = GrpoConfig(advantage="rloo")
    _, ledger = prepare(batch, config, version=VERSION)
    assert not ledger.masked
    samples, ledger = prepare(batch, replace(config, **{kind: "mask"}), version=VERSION)
    assert ledger.masked == {Reason(kind): 2}
    assert [each.trained for each in samples] == [5, 4]
    penalised = replace(config, **{kind: "penalise"}, call_penalty=0.5)
    samples, ledger = prepare(batch, penalised, version=VERSION)
    assert ledger.trained == 11
    assert advantages_by_call(samples, batch[1]) == {0: -1.5, 1: -1.0}
    assert advantages_by_call(samples, batch[0])[0] == pytest.approx(1 + 0.5 * 2 / 6)


def test_all_answers_of_a_session_stopped_at_a_limit_are_truncated() -> None:
    """With `penalise` the session has one lower reward; with `mask` no trainer gets samples."""
    batch = [
        make_session(make_trace({0: 2, 1: 3}), sample=0, reward=Reward(1.0)),
        make_session(
            make_trace({0: 2, 1: 1}), sample=1, reward=Reward(1.0), spent=SpentLimit.MAX_TURNS
        ),
    ]
    config = GrpoConfig(advantage="rloo", truncated="penalise")
    samples, _ = prepare(batch, config, version=VERSION)
    assert advantages_by_call(samples, batch[1]) == pytest.approx({0: -0.1, 1: -0.1})
    made = list(read_group(batch, GrpoConfig(truncated="mask")))
    assert [each.session for each in made] == [batch[0].session]


def test_repeated_answers_are_counted_from_the_configured_number() -> None:
    """With 2, the second equal answer is a repeated one; with 4, the third is not."""
    third = make_trace({0: 2}, repeats=2)
    second = make_trace({1: 3}, repeats=1)
    batch = [make_session(third, second, sample=n, reward=Reward(float(n))) for n in range(2)]
    counts = []
    for limit in (2, 3, 4):
        config = GrpoConfig(repeated="mask", repeated_calls=limit)
        counts.append(prepare(batch, config, version=VERSION)[1].masked.get(Reason.REPEATED, 0))
    assert counts == [10, 4, 0]


def test_the_report_has_the_sum_of_each_term() -> None:
    """Penalties are negative, the bonus of effort is positive."""
    batch = make_groups(tiny(), tasks=1)
    marked = [
        replace(trace, spans=(replace(trace.spans[0], malformed=True), *trace.spans[1:]))
        for trace in batch[0].traces
    ]
    batch[0] = replace(batch[0], traces=tuple(marked))
    config = GrpoConfig(malformed="penalise", efficiency="tokens", overlong_length=1)
    report = Grpo(tiny(), config).step(batch, version=VERSION)
    assert report.shaping["malformed"] == pytest.approx(-0.1 * len(marked))
    efforts = [each.ledger.sampled for each in batch if each.reward == Reward(1.0)]
    saved = sum(1 - effort / max(efforts) for effort in efforts)
    assert report.shaping["efficiency"] == pytest.approx(0.1 * saved)
    overlong = sum((each.ledger.sampled + 4095) / 4096 for each in batch)
    assert report.shaping["overlong"] == pytest.approx(-overlong)
    assert set(report.shaping) == {"malformed", "efficiency", "overlong"}


# --------------------------------------------------------------------------- conservation
@st.composite
def marked_batches(draw: DrawFn) -> list[Trajectory]:
    """Groups of random sessions, some without reward or stopped at a limit, with random marks."""
    batch = []
    for number in range(draw(st.integers(1, 5))):
        calls = draw_session(draw(st.binary(min_size=80, max_size=80)), f"s{number}").calls
        traces, ledger, _ = find(
            "builder", draw(st.sampled_from(["per_request", "prefix_merging"]))
        )().build(calls)
        marked = [
            replace(
                trace,
                spans=tuple(
                    replace(
                        span,
                        malformed=draw(st.booleans()),
                        truncated=draw(st.booleans()),
                        repeats=draw(st.integers(0, 3)),
                    )
                    for span in trace.spans
                ),
            )
            for trace in traces
        ]
        values = {call.number: draw(st.sampled_from([0.0, 0.5, 1.0])) for call in calls}
        value = draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
        batch.append(
            Trajectory(
                session=f"s{number}",
                task=f"t{draw(st.integers(0, 1))}",
                sample=number,
                status=Status.COMPLETED,
                traces=tuple(marked),
                ledger=ledger,
                reward=None if value is None else Reward(value, per_call=values),
                spent=draw(st.sampled_from([None, SpentLimit.MAX_TURNS])),
            )
        )
    return batch


TREATMENTS = st.sampled_from(["train", "mask", "penalise"])


@given(
    batch=marked_batches(),
    credit=st.sampled_from(CREDITS),
    treatments=st.tuples(TREATMENTS, TREATMENTS, TREATMENTS),
    advantage=st.sampled_from(ESTIMATORS),
    stale=st.sampled_from([None, 1]),
)
def test_tokens_are_conserved_under_every_treatment(
    batch: list[Trajectory],
    credit: str,
    treatments: tuple[str, str, str],
    advantage: str,
    stale: int | None,
) -> None:
    """Sampled = trained + masked + dropped (I2), and trained tokens are those of the samples."""
    malformed, truncated, repeated = treatments
    config = GrpoConfig(
        credit=credit,
        advantage=advantage,
        malformed=malformed,  # type: ignore[arg-type]
        truncated=truncated,  # type: ignore[arg-type]
        repeated=repeated,  # type: ignore[arg-type]
        max_staleness=stale,
        efficiency="turns",
    )
    samples, ledger = prepare(batch, config, version=VERSION)
    assert ledger.balanced
    assert ledger.sampled == sum(each.ledger.sampled for each in batch)
    assert ledger.trained == sum(each.trained for each in samples)
    for reason, treatment in zip(("malformed", "truncated", "repeated"), treatments, strict=True):
        if treatment != "mask":
            assert Reason(reason) not in {**ledger.masked, **ledger.dropped}
    assert all(np.isfinite(each.advantages).all() for each in samples)


# --------------------------------------------------------------------------- effort
@given(
    sessions=st.lists(
        st.tuples(
            st.sampled_from([-0.5, 0.0, 0.3, 0.999, 1.0, 1.0, 1.0]),
            st.integers(1, 5),
            st.integers(1, 9),
            st.floats(0, 1e4) | st.none(),
        ),
        min_size=1,
        max_size=8,
    ),
    measure=st.sampled_from(["tokens", "turns", "seconds"]),
    weight=st.floats(0, 100),
)
def test_less_effort_is_better_among_solved_sessions_only(
    sessions: list[tuple[float, int, int, float | None]], measure: str, weight: float
) -> None:
    """Failures keep their rewards, and none of them passes a solved session."""
    group = [
        make_session(
            make_trace(dict.fromkeys(range(turns), tokens)),
            sample=number,
            reward=Reward(value),
            seconds={} if seconds is None else {"run": seconds},
        )
        for number, (value, turns, tokens, seconds) in enumerate(sessions)
    ]
    config = GrpoConfig(efficiency=measure, efficiency_weight=weight)  # type: ignore[arg-type]
    bonus = reward_efficiency(group, config)
    solved = [each for each in group if each.reward == Reward(1.0)]
    assert set(bonus) <= {each.session for each in solved}
    assert all(0 <= value <= weight for value in bonus.values())
    effort = {
        each.session: {
            "tokens": each.ledger.sampled,
            "turns": len(each.traces[0].spans),
            "seconds": each.seconds.get("run"),
        }[measure]
        for each in group
    }
    for one, other in itertools.permutations([e.session for e in solved if e.session in bonus], 2):
        if effort[one] < effort[other] and weight > 1e-6:
            assert bonus[one] >= bonus[other]
    graded, _ = grade(group, replace(config, advantage="dr_grpo"))
    advantage = {name: by_trace[0][0] for name, by_trace in graded.items()}
    value = {each.session: each.reward.value for each in group if each.reward}
    for one, other in itertools.permutations(value, 2):
        if value[one] < 1 and value[one] < value[other]:
            assert advantage[one] < advantage[other] or not any(advantage.values())
