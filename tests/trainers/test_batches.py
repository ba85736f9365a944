"""Which tasks a step has, with `schedule.choose: pass_rate`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.sessions import session
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import TrainConfig
from tugline.trainers.metrics import TrainState
from tugline.types import Trajectory

COUNT, SIZE = 12, 4
HARD, MIXED, EASY = range(4), range(4, 8), range(8, COUNT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task set whose tasks alternate between two kinds."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [{"id": f"t{i}", "question": "?", "kind": "ab"[i % 2]} for i in range(COUNT)]
    (path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(folder: Path, **schedule: Any) -> TaskBatches:
    """Batches of a configuration with this schedule."""
    options = {"path": "tasks.jsonl", "id": "id", "instruction": "{question}", "tags": ["kind"]}
    config = {
        "tasks": {"taskset": {"name": "jsonl", "options": options}},
        "template": {
            "harness": {"name": "shell", "options": {"command": "true"}},
            "evaluator": {"name": "function", "options": {"target": "training_run:by_chance"}},
        },
        "schedule": {"tasks_per_step": SIZE, "choose": "pass_rate"} | schedule,
    }
    return TaskBatches(msgspec.convert(config, TrainConfig), folder)


def earn(task: str, *rewards: float | None) -> list[Trajectory]:
    """Results of a group; None: of a session that failed."""
    return [session([], task=task, sample=n, reward=reward) for n, reward in enumerate(rewards)]


def test_every_task_is_seen_once_in_the_usual_order(folder: Path) -> None:
    """Whatever is known: tasks are drawn only after the last of them was chosen."""
    drawn, fixed = make(folder, tasks_per_step=5), make(folder, tasks_per_step=5, choose="order")
    rates = dict.fromkeys(range(COUNT), 0.0)
    first, usual = (
        [number for step in (1, 2, 3) for number in batches.choose(step, rates)]
        for batches in (drawn, fixed)
    )
    assert first[:COUNT] == usual[:COUNT]
    assert sorted(first[:COUNT]) == list(range(COUNT))
    assert len(set(first[10:])) == 5  # a step has no task twice, if there are enough


def test_batches_follow_from_the_configuration(folder: Path) -> None:
    """Each epoch has every task once, in an order of its own; ids never repeat."""
    tasks, others = (
        [task for step in range(1, 10) for task in each.batch(step, each.choose(step, {}))]
        for each in (make(folder, choose="order"), make(folder, choose="order"))
    )
    assert tasks == others
    assert len({task.id for task in tasks}) == len({t.sampling.seed for t in tasks}) == 3 * COUNT
    names = [task.tags["instance"] for task in tasks]
    epochs = [names[start : start + COUNT] for start in range(0, 3 * COUNT, COUNT)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert all(task.samples == 8 for task in tasks)


def test_tasks_with_mixed_results_are_drawn_more_often(folder: Path) -> None:
    """In the proportion of their weights 0.25 and 0.05, and none is starved."""
    batches = make(folder, tasks_per_step=1)
    rates = dict.fromkeys(HARD, 0.0) | dict.fromkeys(MIXED, 0.5) | dict.fromkeys(EASY, 1.0)
    steps = range(COUNT + 1, COUNT + 1401)
    seen = Counter(number for step in steps for number in batches.choose(step, rates))
    for group, expected in ((HARD, 200), (MIXED, 1000), (EASY, 200)):
        assert sum(seen[number] for number in group) == pytest.approx(expected, rel=0.2)
    assert min(seen[number] for number in range(COUNT)) > 25


@settings(deadline=None)
@given(
    rates=st.dictionaries(st.integers(0, COUNT - 1), st.floats(0, 1)),
    step=st.integers(1, 50),
    seed=st.integers(0, 3),
)
def test_the_same_results_lead_to_the_same_draws(
    folder: Path, rates: dict[int, float], step: int, seed: int
) -> None:
    """Also after a checkpoint, without a task twice, and balanced as the whole set is."""
    batches = make(folder, seed=seed, balance="kind")
    chosen = batches.choose(step, rates)
    extra = msgspec.json.encode(msgspec.to_builtins(TrainState(pass_rates=rates), str_keys=True))
    read = msgspec.convert(msgspec.json.decode(extra), TrainState, str_keys=True, strict=False)
    again = make(folder, seed=seed, balance="kind")
    again.choose(step + 7, {})  # what was drawn before changes nothing
    assert again.choose(step, read.pass_rates) == chosen
    assert len(set(chosen)) == SIZE
    assert Counter(number % 2 for number in chosen) == {0: 2, 1: 2}
    assert len({task.id for task in batches.batch(step, chosen)}) == SIZE


def test_a_set_smaller_than_a_step_is_repeated(folder: Path) -> None:
    """Every task first, then again."""
    chosen = make(folder, tasks_per_step=2 * COUNT).choose(2, {})
    assert Counter(chosen) == dict.fromkeys(range(COUNT), 2)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0, 0.0, 0.0), 0.25),
        ((1.0, None, 0.0, None), 0.5),  # a failure says nothing about the task
        ((None, None), None),
        ((float("nan"), 1.0), 1.0),
        ((-1.0, 3.0), 0.5),  # as 0 and 1
    ],
)
def test_a_pass_rate_is_the_mean_of_what_was_earned(
    folder: Path, rewards: Sequence[float | None], expected: float | None
) -> None:
    """Of the first group; each later one counts for a half."""
    batches = make(folder)
    known = batches.update_rates({}, {"g": 3}, earn("g", *rewards))
    assert known == ({} if expected is None else {3: expected})
    if expected is not None:
        later = batches.update_rates(known, {"g": 3}, earn("g", 0.0, 0.0))
        assert later == {3: pytest.approx(expected / 2)}
    assert make(folder, choose="order").update_rates({}, {"g": 3}, earn("g", 1.0)) == {}
