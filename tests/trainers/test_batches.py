"""The tasks of each step."""

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
from tugline.config import from_mapping
from tugline.errors import ConfigError, UsageError
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
    """Batches with this schedule."""
    options = {"path": "tasks.jsonl", "id": "id", "instruction": "{question}", "tags": ["kind"]}
    config = {
        "tasks": {"taskset": {"name": "jsonl", "options": options}},
        "template": {
            "harness": {"name": "shell", "options": {"command": "true"}},
            "evaluator": {"name": "function", "options": {"target": "support.training:by_chance"}},
        },
        "schedule": {"tasks_per_step": SIZE, "choose": "pass_rate"} | schedule,
    }
    return TaskBatches(msgspec.convert(config, TrainConfig), folder)


def make_group(task: str, *rewards: float | None) -> list[Trajectory]:
    """Results of a group; None is a failed session."""
    return [session([], task=task, sample=n, reward=reward) for n, reward in enumerate(rewards)]


def test_the_first_epoch_has_the_same_order(folder: Path) -> None:
    """Tasks are drawn by pass rate only after each was chosen once."""
    drawn, fixed = make(folder, tasks_per_step=5), make(folder, tasks_per_step=5, choose="order")
    rates = dict.fromkeys(range(COUNT), 0.0)
    chosen, expected = (
        [number for step in (1, 2, 3) for number in batches.choose(step, rates)]
        for batches in (drawn, fixed)
    )
    assert chosen[:COUNT] == expected[:COUNT]
    assert sorted(chosen[:COUNT]) == list(range(COUNT))
    assert len(set(chosen[10:])) == 5  # no task is twice in a step, if there are enough


def test_batches_are_deterministic(folder: Path) -> None:
    """Each epoch has every task once, in another order; ids and seeds are unique."""
    tasks, others = (
        [
            task
            for step in range(1, 10)
            for task in each.batch((step - 1) * SIZE, each.choose(step, {}))
        ]
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
    """Tasks are drawn in proportion to their weights, 0.25 and 0.05."""
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
def test_draws_depend_on_results_and_step(
    folder: Path, rates: dict[int, float], step: int, seed: int
) -> None:
    """A restored sampler draws the same tasks; none is drawn twice, and tags are balanced."""
    batches = make(folder, seed=seed, balance="kind")
    chosen = batches.choose(step, rates)
    extra = msgspec.json.encode(msgspec.to_builtins(TrainState(pass_rates=rates), str_keys=True))
    read = msgspec.convert(msgspec.json.decode(extra), TrainState, str_keys=True, strict=False)
    again = make(folder, seed=seed, balance="kind")
    again.choose(step + 7, {})  # earlier draws do not matter
    assert again.choose(step, read.pass_rates) == chosen
    assert len(set(chosen)) == SIZE
    assert Counter(number % 2 for number in chosen) == {0: 2, 1: 2}
    assert len({task.id for task in batches.batch((step - 1) * SIZE, chosen)}) == SIZE


def test_a_small_set_is_repeated_within_a_step(folder: Path) -> None:
    """Every task is in the step equally often."""
    chosen = make(folder, tasks_per_step=2 * COUNT).choose(2, {})
    assert Counter(chosen) == dict.fromkeys(range(COUNT), 2)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0, 0.0, 0.0), 0.25),
        ((1.0, None, 0.0, None), 0.5),  # failed sessions do not count
        ((None, None), None),
        ((float("nan"), 1.0), 1.0),
        ((-1.0, 3.0), 0.5),  # counted as 0 and 1
    ],
)
def test_pass_rates_are_means_of_rewards(
    folder: Path, rewards: Sequence[float | None], expected: float | None
) -> None:
    """A pass rate begins as the first group's mean; each later group has a weight of 1/2."""
    batches = make(folder)
    known = batches.update_rates({}, {"g": 3}, make_group("g", *rewards))
    assert known == ({} if expected is None else {3: expected})
    if expected is not None:
        later = batches.update_rates(known, {"g": 3}, make_group("g", 0.0, 0.0))
        assert later == {3: pytest.approx(expected / 2)}
    assert make(folder, choose="order").update_rates({}, {"g": 3}, make_group("g", 1.0)) == {}


def test_tasks_that_changed_are_noticed_on_resume(folder: Path, tmp_path: Path) -> None:
    """Fewer, other, changed or reordered tasks are refused by name; the same tasks are not."""
    lines = (folder / "tasks.jsonl").read_text().splitlines(keepends=True)
    run, source = tmp_path / "run", tmp_path / "source"
    run.mkdir()
    source.mkdir()

    def start(*rows: str) -> None:
        (source / "tasks.jsonl").write_text("".join(rows))
        make(source).store(run)

    start(*lines)
    start(*lines)
    for rows, message in (
        (lines[:9], "3 removed, such as 't10'"),
        ([*lines[:-1], lines[-1].replace("t11", "t12")], "1 removed.*'t11', 1 added.*'t12'"),
        ([lines[0].replace("?", "!"), *lines[1:]], "1 changed, such as 't0'"),
        (lines[::-1], "their order is different"),
    ):
        with pytest.raises(UsageError, match=f"^the tasks have changed since .*: {message}"):
            start(*rows)
    start(*lines)


def test_a_task_set_file_is_the_same_as_its_content(folder: Path, tmp_path: Path) -> None:
    """Its path alone, or with the options of a held-out set; its own paths are relative to it."""
    (folder / "set.yaml").write_text(
        "taskset: {name: jsonl, options: {path: tasks.jsonl, id: id, instruction: '{question}',"
        " tags: [kind]}}\n"
        "template:\n"
        "  harness: {name: shell, options: {command: 'false'}}\n"
        "  evaluator: {name: function, options: {target: 'support.training:by_chance'}}\n"
        "select: {include: ['t1*']}\n"
    )
    own = {"harness": {"name": "shell", "options": {"command": "true"}}}
    config = msgspec.convert({"tasks": str(folder / "set.yaml"), "template": own}, TrainConfig)
    batches = TaskBatches(config, tmp_path)
    assert [task.id for task in batches.trained] == ["t1", "t10", "t11"]
    assert batches.trained[0].harness.options == {"command": "true"}
    expected = [task for task in make(folder).trained if task.id.startswith("t1")]
    assert batches.trained == expected
    held_out = {"file": str(folder / "set.yaml")}
    source = {"taskset": {"name": "demo"}}
    for values, message in (
        ({"tasks": {**held_out, **source}}, "give either `file`"),
        ({"tasks": {"file": "x", "select": {"split": "train"}}}, "select has no effect"),
        ({"tasks": {}}, "give either `file`"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_mapping(values, TrainConfig)
    (tmp_path / "none.yaml").write_text("a: 1\n")
    config = msgspec.convert({"tasks": "none.yaml", "template": own}, TrainConfig)
    with pytest.raises(ConfigError, match="is not a task-set file"):
        TaskBatches(config, tmp_path)
