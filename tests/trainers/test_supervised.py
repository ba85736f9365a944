"""Rows of conversations that are trained beside sessions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.training import write_config
from trainers.sessions import VERSION, gradient, groups, tiny
from trainers.test_loop import MODEL, run
from trainers.test_sft import made_samples
from tugline.errors import ConfigError, TuglineError, UsageError
from tugline.trainers.batches import TaskBatches, describe
from tugline.trainers.config import CHECKPOINTS, TrainConfig, read_config
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.sft import Sft, SftConfig
from tugline.trainers.sinks import METRICS, read_lines
from tugline.trainers.supervised import SupervisedRows, read_supervised
from tugline.types import Sample

WEIGHT = 0.5
BY_SAMPLE = {"evaluator": {"name": "function", "options": {"target": "support.training:by_sample"}}}


@pytest.mark.parametrize("options", [{}, {"tree_packing": False}, {"micro_tokens": 90}])
def test_the_gradient_is_the_sum_of_both(options: dict[str, Any]) -> None:
    """That of sessions plus the weighted one of the rows as `tugline sft` computes it (float64)."""
    batch = groups(tiny())
    rows = made_samples(5)
    shared = {"max_grad_norm": 1e9, **options}

    def run_step(weight: float, supervised: list[Sample]) -> tuple[torch.Tensor, Any]:
        config = GrpoConfig(cross_entropy=weight, tool_tokens=False, **shared)
        trainer = Grpo(tiny().double(), config)
        report = trainer.step(batch, version=VERSION, supervised=supervised)
        return gradient(trainer.model), report

    sessions, plain = run_step(0.0, [])
    mixture, report = run_step(WEIGHT, rows)
    alone = Sft(tiny().double(), SftConfig(**shared))
    done = alone.update(rows)
    expected = sessions + WEIGHT * gradient(alone.model)
    assert float((mixture - expected).abs().max()) < 1e-10 * float(expected.abs().max())
    assert float((mixture - sessions).abs().max()) > 0.01 * float(sessions.abs().max())
    assert report.terms["supervised"] == pytest.approx(WEIGHT * done.sums["loss"], rel=1e-9)
    assert report.terms["policy"] == plain.terms["policy"]
    assert report.ledger == plain.ledger


@settings(deadline=None)
@given(count=st.integers(1, 9), per_step=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_row_is_used_once_in_a_pass(count: int, per_step: int, seed: int) -> None:
    """The rows of a step depend on its number and the seed only, in another order in each pass."""
    samples = made_samples(count)
    first, again = (SupervisedRows(samples, per_step, seed) for _ in range(2))
    steps = [first.choose(step) for step in range(1, 13)]
    assert [again.choose(step) for step in range(12, 0, -1)] == steps[::-1]
    taken = [each.session for rows in steps for each in rows]
    assert len(taken) == 12 * per_step
    for start in range(0, len(taken) - count, count):
        assert len({*taken[start : start + count]}) == count


def write_rows(folder: Path, *lengths: int) -> None:
    """Write conversations whose answers have these numbers of words."""
    rows = [
        {"messages": [{"role": "user", "content": "Go."},
                      {"role": "assistant", "content": "read " * length}]}
        for length in lengths
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def configure(folder: Path, **sections: Any) -> Path:
    """Write a run with two supervised rows in a step."""
    sections = {"supervised": {"data": ["rows.jsonl"], "rows": 2}, "heldout": None} | sections
    sections = {"grpo": {"cross_entropy": 0.2}} | sections
    return write_config(folder, **sections)


def read(path: Path) -> TrainConfig:
    """The settings of a run."""
    return read_config(path, MODEL)


@pytest.mark.engine
async def test_a_resumed_run_takes_the_same_rows(tmp_path: Path) -> None:
    """Steps that are trained again have the same losses; the rows are a term of their own."""
    write_rows(tmp_path, 3, 9, 5, 7, 4)
    schedule = {"steps": 4, "tasks_per_step": 1, "samples": 2, "checkpoint_every": 1, "keep": 9}
    path = configure(tmp_path, schedule=schedule, template=BY_SAMPLE)
    folder = tmp_path / "run"
    await run(path, folder)

    def list_terms() -> list[float]:
        lines = read_lines(folder / METRICS)
        return [line["update/terms/supervised"] for line in lines if "update/updates" in line]

    first = list_terms()
    assert len({*first}) == len(first) == 4
    assert all(value > 0 for value in first)
    for step in (2, 3, 4):
        shutil.rmtree(folder / CHECKPOINTS / f"step-{step:06d}")
    await run(path, folder)
    assert list_terms() == first
    write_rows(tmp_path, 3, 9, 5, 7, 6)
    with pytest.raises(UsageError, match=r"rows of supervised.data have changed since .*/run"):
        await run(path, folder)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"grpo": {"cross_entropy": 0}}, "grpo.cross_entropy is 0, so the rows of `supervised`"),
        ({"supervised": {"data": []}}, "supervised.data is empty"),
        ({"supervised": {"data": ["rows.jsonl"], "rows": 0}}, r"supervised.rows is 0"),
        ({"supervised": {"data": ["none.jsonl"]}}, "none.jsonl cannot be read as conversations"),
        ({"supervised": {"data": ["train.jsonl"]}}, "must have messages, or ids and loss_mask"),
        ({"supervised": {"data": ["odd.jsonl"]}}, "is not a conversation in the format of the"),
        ({"window": 30}, "supervised.data: 1 of 2 rows are longer than the window of 30 tokens"),
        ({"supervised": {"data": ["silent.jsonl"]}}, "has no row with an answer to train on"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, sections: dict[str, Any], error: str) -> None:
    """The error names the key, or the file and the line, before anything is sampled."""
    write_rows(tmp_path, 3, 90)
    (tmp_path / "odd.jsonl").write_text('{"messages": [{"role": 5}]}\n')
    silent = {"messages": [{"role": "user", "content": "Go."}]}
    (tmp_path / "silent.jsonl").write_text(json.dumps(silent) + "\n")
    with pytest.raises((ConfigError, UsageError), match=error) as raised:
        read_supervised(read(configure(tmp_path, **sections)))
    assert isinstance(raised.value, TuglineError)


def test_the_plan_names_the_rows(tmp_path: Path) -> None:
    """A dry run says how many rows a step has, their weight, and the bounds of a refill."""
    write_rows(tmp_path, 3, 5, 7)
    config = read(configure(tmp_path, schedule={"refill": True}))
    rows = len(read_supervised(config).samples)
    plan = describe(config, TaskBatches(config, tmp_path), tmp_path, rows=rows)
    assert "supervised  2 of 3 rows in each step, weight 0.2, and tool output" in plan
    assert "refill      until 2 groups have a signal, at most 8 groups a step" in plan
    assert "sessions    12 to 48, 2 in a group" in plan
