"""Which sessions are exported, and where to, is decided by names, rewards and a seed alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exports.made import call, export, record, two_turns
from tugline.exports.base import SkipReason
from tugline.exports.pipeline import Selection, SessionSummary, Split, select, summarize
from tugline.types import Status


def entry(name: str, **fields: Any) -> SessionSummary:
    """A completed session of task ``t`` that earned 1."""
    defaults: dict[str, Any] = {
        "path": Path(f"runs/{name}.0.rec"),
        "session": name,
        "task": "t",
        "sample": 0,
        "tags": {},
        "status": Status.COMPLETED,
        "reward": 1.0,
        "tokenizer": "",
        "answers": name.encode(),
    }
    return SessionSummary(**defaults | fields)


def kept(
    entries: list[SessionSummary], *, needs_reward: bool = False, **selection: Any
) -> tuple[list[str], dict[SkipReason, int]]:
    """Names of the sessions that are left, and why others are not."""
    found, left = select(entries, Selection(**selection), needs_reward=needs_reward)
    return [one.session for one in found], dict(left)


def test_each_filter_counts_what_it_leaves_out() -> None:
    """Nothing disappears without a reason."""
    entries = [
        entry("a"),
        entry("b", status=Status.TIMED_OUT),
        entry("c", tags={"k": "w"}),
        entry("d", reward=None),
        entry("e", reward=0.2),
        entry("f", status=None),
    ]
    assert kept(entries)[0] == list("abcdef")
    assert kept(entries, status=frozenset({Status.COMPLETED}))[1] == {SkipReason.STATUS: 2}
    assert kept(entries, tags={"k": "w"}) == (["c"], {SkipReason.TAG: 5})
    assert kept(entries, min_reward=0.5)[1] == {SkipReason.NO_REWARD: 1, SkipReason.LOW_REWARD: 1}
    assert kept(entries, needs_reward=True)[1] == {SkipReason.NO_REWARD: 1}


def test_the_best_of_a_task_are_its_best_different_sessions() -> None:
    """Equal rewards are told apart by the sample's number, and twins count once."""
    entries = [
        entry("a", sample=0, reward=0.5),
        entry("b", sample=1, reward=1.0),
        entry("c", sample=2, reward=1.0, answers=b"b"),
        entry("d", sample=3, reward=1.0),
        entry("e", task="u", reward=0.0),
    ]
    assert kept(entries, best_of=1) == (["b", "e"], {SkipReason.NOT_BEST: 3})
    assert kept(entries, best_of=2)[0] == ["b", "c", "e"]
    twins_once = (["b", "d", "e"], {SkipReason.NOT_BEST: 1, SkipReason.DUPLICATE: 1})
    assert kept(entries, best_of=2, dedupe=True) == twins_once


@given(st.integers(0, 5), st.lists(st.floats(0.1, 1), min_size=1, max_size=4))
def test_every_task_is_in_a_file(seed: int, weights: list[float]) -> None:
    """Whatever the shares, rounded or not, each task has one of the files."""
    shares = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    split = Split(shares=shares, seed=seed)
    assert {split.choose_file(str(task)) for task in range(60)} <= shares.keys()


def test_a_split_has_its_shares_and_depends_on_the_seed() -> None:
    """A task's file depends on nothing but its id and the seed."""
    splits = [Split(shares={"train": 0.8, "test": 0.2}, seed=seed) for seed in (0, 0, 1)]
    first, again, other = ([one.choose_file(str(i)) for i in range(400)] for one in splits)
    assert first == again != other
    assert 0.7 < Counter(first)["train"] / 400 < 0.9


def test_sessions_that_say_the_same_are_known_by_their_tokens(tmp_path: Path) -> None:
    """What the harness asked may differ; what the model said decides."""
    record(tmp_path, "a")
    record(tmp_path, "b", sample=1)
    record(tmp_path, "c", sample=2, calls=[call(0, [7], [12, 13]), two_turns()[1]])
    record(tmp_path, "d", sample=3, calls=[call(0, [7], [12]), two_turns()[1]])
    summary = export("parquet", tmp_path, tmp_path / "out", selection=Selection(dedupe=True))
    assert (summary.exported, summary.left_out) == (2, {SkipReason.DUPLICATE: 2})


def test_a_reward_that_is_no_number_is_none(tmp_path: Path) -> None:
    """An evaluator's NaN does not become anybody's best session."""
    found = summarize(record(tmp_path, "a", reward=float("nan")))
    assert found is not None
    assert found.reward is None
