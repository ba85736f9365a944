"""Which sessions are exported, and where to, is decided by names, rewards and a seed alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exports.made import call, export, record, two_turns
from tugline.errors import UsageError
from tugline.exports.base import SkipReason
from tugline.exports.select import Selection, SessionSummary, Split, select, summarize
from tugline.types import Status


def entry(name: str, **fields: Any) -> SessionSummary:
    """A completed session of task ``t`` that earned 1."""
    defaults: dict[str, Any] = {
        "path": Path(f"runs/{name}.0.rec"),
        "session": name,
        "task": "t",
        "sample": 0,
        "epoch": 0,
        "tags": {},
        "status": Status.COMPLETED,
        "reward": 1.0,
        "tokenizer": "",
        "answers": name.encode(),
    }
    return SessionSummary(**defaults | fields)


def kept(
    entries: list[SessionSummary], **selection: Any
) -> tuple[list[str], dict[SkipReason, int]]:
    """Names of the sessions that are left, and why others are not."""
    found, left = select(entries, Selection(**selection))
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


def test_one_per_task_is_drawn_by_the_seed() -> None:
    """The draw is the same each time, and another seed draws others."""
    entries = [entry(f"{t}-{s}", task=str(t), sample=s) for t in range(8) for s in range(4)]
    first, left = kept(entries, one_per_task=True, seed=1)
    assert [name.split("-")[0] for name in first] == [str(t) for t in range(8)]
    assert left == {SkipReason.NOT_DRAWN: 24}
    assert kept(entries[::-1], one_per_task=True, seed=1)[0] == first
    assert kept(entries, one_per_task=True, seed=2)[0] != first


def test_the_last_attempt_of_a_session_counts() -> None:
    """An attempt whose lease was lost is not a second sample; another run's session is."""
    again = entry("a", epoch=1, path=Path("runs/a.1.rec"))
    other = entry("a", path=Path("other/a.0.rec"))
    found, left = select([again, entry("a"), other], Selection())
    assert [one.path for one in found] == [other.path, again.path]
    assert left == {SkipReason.SUPERSEDED: 1}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from("xy")), max_size=60),
    st.integers(0, 5),
    st.booleans(),
)
def test_all_samples_of_a_task_are_in_one_file(
    drawn: list[tuple[int, str]],
    seed: int,
    stratify: bool,  # noqa: FBT001
) -> None:
    """Whatever the split, no task is in two files, and every task is in one."""
    tags = {task: {"k": tag} for task, tag in drawn}
    entries = [entry(f"{i}", task=str(task), tags=tags[task]) for i, (task, _) in enumerate(drawn)]
    split = Split(shares={"a": 0.5, "b": 0.5}, stratify="k" if stratify else None, seed=seed)
    dealt = split.assign(entries)
    assert dealt.keys() == {one.task for one in entries}
    assert set(dealt.values()) <= {"a", "b"}
    assert split.assign(entries[::-1]) == dealt


def test_a_split_stays_when_tasks_are_added() -> None:
    """A task that was for testing is never trained on in a later export."""
    split = Split(shares={"train": 0.8, "test": 0.2})
    early = split.assign([entry(str(i), task=str(i)) for i in range(200)])
    late = split.assign([entry(str(i), task=str(i)) for i in range(400)])
    assert {task: late[task] for task in early} == early
    assert 0.7 < Counter(late.values())["train"] / 400 < 0.9


def test_a_stratified_split_has_its_shares_of_every_value() -> None:
    """Ten hard and thirty easy tasks are both cut at a fifth."""
    entries = [
        entry(str(i), task=str(i), tags={"k": "hard" if i < 10 else "easy"}) for i in range(40)
    ]
    dealt = Split(shares={"train": 0.8, "test": 0.2}, stratify="k").assign(entries)
    by_value = Counter((one.tags["k"], dealt[one.task]) for one in entries)
    assert by_value[("hard", "test")] == 2
    assert by_value[("easy", "test")] == 6
    with pytest.raises(UsageError, match="--stratify family: task 0 has no such tag"):
        Split(shares={"a": 1.0}, stratify="family").assign(entries)


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
