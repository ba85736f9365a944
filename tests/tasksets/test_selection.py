"""Selection and order of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tugline.datasets.files import Difficulty, TaskSelection
from tugline.errors import ConfigError
from tugline.types import PluginSpec, Task

NAMES = [f"case-{number}" for number in range(400)]


def tasks(names: Sequence[str] = NAMES, prefix: str = "") -> list[Task]:
    """A task for each name."""
    part = PluginSpec("x")
    return [
        Task(
            id=prefix + name,
            instruction="",
            harness=part,
            evaluator=part,
            tags={"instance": name, "kind": "odd" if int(name[5:]) % 2 else "even"},
        )
        for name in names
    ]


def pick(
    selection: TaskSelection, among: Sequence[Task] | None = None, folder: Path = Path()
) -> list[str]:
    """The names of the selected tasks."""
    selected = selection.pick(tasks() if among is None else among, folder=folder)
    return [task.tags["instance"] for task in selected]


def test_shares_are_disjoint_and_stable() -> None:
    """An instance's split depends on its name alone; sizes are about the shares."""
    shares = {"train": 0.75, "test": 0.25}
    train = pick(TaskSelection(shares=shares, split="train"))
    test = pick(TaskSelection(shares=shares, split="test"))
    assert sorted(train + test) == sorted(NAMES)
    assert 260 < len(train) < 340
    fewer = pick(TaskSelection(shares=shares, split="test"), tasks(NAMES[:50]))
    assert fewer == [name for name in test if name in NAMES[:50]]


def test_shares_may_have_rounding_errors() -> None:
    """0.8 + 0.05 + 0.05 + 0.1 counts as 1."""
    TaskSelection(shares={"a": 0.8, "b": 0.05, "c": 0.05, "d": 0.1}).check("set.yaml")
    TaskSelection(shares={"a": 0.56, "b": 0.33, "c": 0.11}).check("set.yaml")


def test_shares_may_leave_tasks_out() -> None:
    """With shares below 1 some tasks are in no split."""
    half = pick(TaskSelection(shares={"train": 0.5}, split="train"))
    assert 150 < len(half) < 250


def test_order_depends_on_the_seed_alone() -> None:
    """The same seed gives the same order, also among other tasks."""
    order = pick(TaskSelection(shuffle=1))
    assert order == pick(TaskSelection(shuffle=1), list(reversed(tasks())))
    assert order != NAMES
    assert sorted(order) == sorted(NAMES)
    assert order != pick(TaskSelection(shuffle=2))
    some = set(NAMES[::3])
    assert pick(TaskSelection(shuffle=1), tasks(NAMES[::3])) == [n for n in order if n in some]
    assert pick(TaskSelection(shuffle=1, limit=5)) == order[:5]


def test_patterns_and_tags() -> None:
    """A selected task meets all conditions."""
    chosen = TaskSelection(include=("case-1?", "case-2?"), exclude=("*9",), tags={"kind": "o*"})
    assert pick(chosen) == ["case-11", "case-13", "case-15", "case-17"] + [
        f"case-2{n}" for n in (1, 3, 5, 7)
    ]


def view(task: str, reward: float | None, number: int) -> bytes:
    """A line of a results file."""
    zeros = dict.fromkeys(("attempt", "sampled", "trained", "bytes", "created"), 0)
    which = {"session": f"{task}-{number}", "task": task, "sample": number, "position": number}
    rest = {"tenant": "default", "status": "completed", "failure": None, "seconds": {}}
    return msgspec.json.encode({**zeros, **which, **rest, "reward": reward})


def test_difficulty_is_the_mean_reward_of_earlier_runs(tmp_path: Path) -> None:
    """Tasks that were always or never solved are left out; missing rewards do not count."""
    past = {
        "old-case-0": [1.0, 1.0],
        "old-case-1": [0.0, 0.0],
        "old-case-2": [1.0, 0.0, None],
        "old-case-3": [None, None],
    }
    lines = [view(task, r, n) for task, many in past.items() for n, r in enumerate(many)]
    (tmp_path / "results.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    hard = Difficulty(results=".", min=0.1, max=0.9, prefix="old-")
    some = tasks(NAMES[:5])
    assert pick(TaskSelection(difficulty=hard), some, folder=tmp_path) == [
        "case-2",
        "case-3",
        "case-4",
    ]
    sure = msgspec.structs.replace(hard, unknown=False, results="results.jsonl", samples=2)
    assert pick(TaskSelection(difficulty=sure), some, folder=tmp_path) == ["case-2"]
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(
        ConfigError, match=r"select\.difficulty\.results: .*is not a file of results of"
    ):
        pick(TaskSelection(difficulty=hard), some, folder=tmp_path)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (TaskSelection(shares={"a": 0.7, "b": 0.4}), "select.shares is"),
        (TaskSelection(shares={"a": 0.5}, split="b"), "split is 'b', must be one of shares: a"),
        (TaskSelection(difficulty=Difficulty("r", min=0.9, max=0.1)), "difficulty.min is 0.9"),
    ],
    ids=["shares", "split", "difficulty"],
)
def test_contradictory_settings_are_reported(selection: TaskSelection, message: str) -> None:
    """The error has field and value."""
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        selection.check("set.yaml")
