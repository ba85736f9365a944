"""Which sessions are exported, and to which file of a split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exports.made import call, export, record, two_turns
from tugline.exports.base import SkipReason
from tugline.exports.pipeline import Selection, SessionSummary, Split, select, summarize
from tugline.schema import read_jsonl
from tugline.types import Status

CASES = [row for _, row in read_jsonl(Path(__file__).with_name("selections.jsonl"))]
"""Changes of `PLAIN` by session, the kept sessions, and the number of others by reason."""
PLAIN = {
    "task": "t",
    "problem": "t",
    "held_out": False,
    "sample": 0,
    "tags": {},
    "status": "completed",
    "reward": 1.0,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["shows"])
def test_a_selection_counts_what_it_leaves_out(case: dict[str, Any]) -> None:
    """Sessions that are left out are counted by reason."""
    sessions = []
    for name, fields in case["sessions"].items():
        values = {**PLAIN, "tokenizer": "", "answers": name, **fields}
        values |= {"session": name, "answers": values["answers"].encode()}
        status = values["status"] and Status(values["status"])
        path = Path(f"runs/{name}.0.rec")
        sessions.append(SessionSummary(**values | {"path": path, "status": status}))
    selection = msgspec.convert(case["selection"], Selection)
    kept, left = select(sessions, selection, needs_reward=case.get("needs_reward", False))
    assert "".join(session.session for session in kept) == case["kept"]
    assert left == case["left_out"]


@given(st.integers(0, 5), st.lists(st.floats(0.1, 1), min_size=1, max_size=4))
def test_every_task_has_a_file(seed: int, weights: list[float]) -> None:
    """Each task is in one file for any shares, rounded or not."""
    shares = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    split = Split(shares=shares, seed=seed)
    assert {split.choose_file(str(task)) for task in range(60)} <= shares.keys()


def test_files_depend_on_task_and_seed() -> None:
    """Only task and seed decide the file; the shares are approximately those given."""
    splits = [Split(shares={"train": 0.8, "test": 0.2}, seed=seed) for seed in (0, 0, 1)]
    first, again, other = ([split.choose_file(str(i)) for i in range(400)] for split in splits)
    assert first == again != other
    assert 0.7 < Counter(first)["train"] / 400 < 0.9


def test_duplicates_have_the_same_sampled_tokens(tmp_path: Path) -> None:
    """Prompts of duplicates may differ."""
    record(tmp_path, "a")
    record(tmp_path, "b", sample=1)
    record(tmp_path, "c", sample=2, calls=[call(0, [7], [12, 13]), two_turns()[1]])
    record(tmp_path, "d", sample=3, calls=[call(0, [7], [12]), two_turns()[1]])
    summary = export("parquet", tmp_path, tmp_path / "out", selection=Selection(dedupe=True))
    assert (summary.exported, summary.left_out) == (2, {SkipReason.DUPLICATE: 2})


def test_a_reward_of_nan_is_none(tmp_path: Path) -> None:
    """A reward of NaN is never the best of a group."""
    summary = summarize(record(tmp_path, "a", reward=float("nan")))
    assert summary is not None
    assert summary.reward is None
