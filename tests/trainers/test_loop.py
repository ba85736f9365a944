"""The training loop with a real engine, gateway, node and agent."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook

from support import training
from support.models import make_kind
from support.training import write_config
from tugline.errors import ConfigError, EngineError, UsageError
from tugline.inference.load import load
from tugline.schema import read_jsonl
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import CHECKPOINTS, read_config, store_config
from tugline.trainers.config import MODEL as RESULT
from tugline.trainers.grpo import checkpoint
from tugline.trainers.loop import train
from tugline.trainers.metrics import TrainSummary
from tugline.trainers.progress import RunProgress
from tugline.trainers.sinks import METRICS, make_sinks, read_lines

MODEL = Path("none")
BY_SAMPLE = {"evaluator": {"name": "function", "options": {"target": "support.training:by_sample"}}}
"""Nodes in processes of their own run sessions in any order, so that chance may give no signal."""


async def run(config: Path, folder: Path, report: Callable[[str], object] = str) -> TrainSummary:
    """Train in this process."""
    settings = read_config(config, MODEL)
    sinks = make_sinks(settings.metrics, Console(quiet=True))
    batches = TaskBatches(settings, config.parent)
    return await train(settings, batches, folder, sinks, RunProgress(report))


def rows(folder: Path, key: str) -> list[dict[str, Any]]:
    """Lines of the metrics with this figure."""
    return [row for row in read_lines(folder / METRICS) if key in row]


@pytest.fixture
def learners() -> Iterator[set[int]]:
    """Threads in which a forward pass with gradient ran."""
    threads: set[int] = set()

    def note(*_call: object) -> None:
        if torch.is_grad_enabled():
            threads.add(threading.get_ident())

    hook = register_module_forward_pre_hook(note)
    yield threads
    hook.remove()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("staleness", "pause", "changes"),
    [
        (0, "wait", {}),
        (1, "abort", {"lora": {"rank": 4}, "grpo": {"lr": 1e-2}}),
        pytest.param(1, "keep", {}, marks=pytest.mark.slow),
        (2, "wait", {}),
        pytest.param(
            *(1, "abort", {"node": {"slots": 4, "processes": 2}, "template": BY_SAMPLE}),
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_run_trains_every_batch_within_its_staleness(
    tmp_path: Path,
    learners: set[int],
    monkeypatch: pytest.MonkeyPatch,
    staleness: int,
    pause: str,
    changes: dict[str, Any],
) -> None:
    """All sessions are trained once, no token is too old, and publications are checked.

    All updates run in one thread, since each thread keeps the memory of a step.

    All files of a run are checked together, since a run takes seconds.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for nodes that are processes
    schedule: dict[str, Any] = {"steps": 3, "tasks_per_step": 2, "samples": 2}
    schedule |= {"staleness": staleness, "pause": pause}
    config = write_config(tmp_path, schedule=schedule, **changes)
    state = (await run(config, tmp_path / "run")).state
    assert (state.step, state.version, state.sessions, state.failed) == (3, 3, 12, 0)
    assert state.ledger.balanced
    assert len(learners) <= 1
    steps = rows(tmp_path / "run", "rollout/reward")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["rollout/sessions"] == 4 for row in steps)
    ages = [row["rollout/staleness_max"] for row in steps if row.get("update/ledger/trained")]
    assert max(ages) <= staleness
    if staleness == 0:  # all tokens have the version of the trainer
        assert all(
            row["update/mismatch/total/max_abs"] < 1e-4
            for row in steps
            if "update/mismatch/total/max_abs" in row
        )
    published = rows(tmp_path / "run", "publish/version")
    assert [row["publish/version"] for row in published] == [1, 2, 3]
    assert all(row["publish/max_abs_dlogprob"] < 1e-4 for row in published)
    arrived = [row["publish/arrived"] for row in published if row["publish/moved"]]
    assert arrived == pytest.approx([1.0] * len(arrived), abs=1e-3)
    assert [(score.step, score.version, score.mixed) for score in state.scores] == [
        (0, 0, 0), (2, 2, 0), (3, 3, 0),
    ]  # fmt: skip
    assert all(score.evaluation.attempts == 2 for score in state.scores)


@pytest.mark.engine
async def test_a_finished_run_continues_with_more_steps(tmp_path: Path) -> None:
    """Finished steps are not repeated, and other settings are refused.

    At each end the trained model and its tokenizer are written as engines load them.
    """
    plan = {"steps": 1, "tasks_per_step": 1, "samples": 2}
    prices = {"gpu_hour": 3600.0, "sampled_tokens": 1e6}
    folder = tmp_path / "run"
    first = await run(write_config(tmp_path, schedule=plan, prices=prices), folder)
    changes = {"schedule": plan | {"steps": 2}, "prices": prices}
    summary = await run(write_config(tmp_path, **changes), folder)
    assert (summary.state.step, summary.state.sessions) == (2, 4)
    assert [row["step"] for row in rows(folder, "rollout/reward")] == [1, 2]
    costs = [row["cost/total"] for row in rows(folder, "cost/step")]
    assert costs[0] < first.state.cost < costs[1] < summary.state.cost
    tokens = summary.state.ledger.sampled + sum(score.sampled for score in summary.state.scores)
    assert summary.state.cost == pytest.approx(tokens + summary.state.elapsed_s, abs=1.0)
    assert [score.step for score in summary.state.scores] == [0, 1, 2]  # 0 and the end of each run
    assert sorted(path.name for path in (folder / CHECKPOINTS).iterdir()) == [
        "step-000001", "step-000002",
    ]  # fmt: skip
    model, tokenizer, _ = load(folder / RESULT)
    assert tokenizer.to_json() == load(tmp_path / "model")[1].to_json()
    trained = load_file(folder / CHECKPOINTS / "step-000002" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], trained[name]) for name in trained)
    with pytest.raises(UsageError, match="other values of schedule"):
        await run(write_config(tmp_path, schedule=plan | {"samples": 3}), folder)


@pytest.mark.engine
async def test_a_hybrid_with_images_trains(tmp_path: Path) -> None:
    """Engine and trainer agree, and the trained model has the vision weights unchanged."""
    plan = {"steps": 2, "tasks_per_step": 2, "samples": 2}
    config = write_config(tmp_path, schedule=plan, heldout=None)
    source = tmp_path / "model"
    model = make_kind("qwen3_5_with_images")
    model.resize_token_embeddings(1400, mean_resizing=False)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(source)
    notes: list[str] = []
    await run(config, tmp_path / "run", notes.append)
    assert "packing: prefixes that traces share are computed once" in notes
    steps = rows(tmp_path / "run", "update/mismatch/total/max_abs")
    published = rows(tmp_path / "run", "publish/version")
    assert len(steps) + len(published) > 2
    assert all(row["update/mismatch/total/max_abs"] < 1e-4 for row in steps)
    assert all(row["publish/max_abs_dlogprob"] < 1e-4 for row in published)
    before, after = (
        load_file(each / "model.safetensors") for each in (source, tmp_path / "run" / RESULT)
    )
    assert before.keys() == after.keys()
    vision = {name for name in before if ".visual." in name}
    assert vision
    assert {name for name in before if torch.equal(before[name], after[name])} == vision


@pytest.mark.engine
@pytest.mark.parametrize("refill", [False, True])
async def test_alarms_are_logged_with_the_figures(tmp_path: Path, *, refill: bool) -> None:
    """An alarm is logged with its cause: here, no session has a reward."""
    plan = {"steps": 1, "tasks_per_step": 1, "samples": 2, "refill": refill}
    never = {"evaluator": {"name": "function", "options": {"target": "support.training:never"}}}
    await run(write_config(tmp_path, schedule=plan, heldout=None, template=never), tmp_path / "run")
    notes = {row["note"]: row["text"] for row in rows(tmp_path / "run", "note")}
    expected = {"alarm no_signal", "alarm no_tokens"}
    if refill:
        expected |= {"alarm refill"}
        assert "1 less than asked: after 4 groups the limit" in notes["alarm refill"]
    assert notes.keys() == expected
    assert "all rewards within each group are equal (mean 0.00)" in notes["alarm no_signal"]


@pytest.mark.engine
async def test_a_step_whose_sessions_all_failed_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs again after pauses, up to `patience`; the run then ends and can be resumed."""
    plan = {"steps": 1, "tasks_per_step": 1, "samples": 2, "patience": 0}
    judged = {
        "evaluator": {"name": "function", "options": {"target": "support.training:unavailable"}}
    }
    config = write_config(tmp_path, schedule=plan, heldout={"samples": 1}, template=judged)
    folder = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(EngineError, match=r"of 2 sessions, evaluator: .*the judge is away"):
            await run(config, folder)
    monkeypatch.setattr(training, "UNAVAILABLE", [])  # the judge is back
    patient = write_config(tmp_path, schedule=plan | {"patience": 60}, template=judged)
    summary = await run(patient, folder)
    assert (summary.state.step, summary.state.failed) == (1, 0)


@pytest.mark.engine
async def test_figures_are_logged_in_the_order_of_steps(tmp_path: Path) -> None:
    """Figures are in order, as wandb needs, though an evaluation outlasts the next step."""
    plan = {"steps": 2, "tasks_per_step": 1, "samples": 2, "staleness": 1}
    config = write_config(tmp_path, schedule=plan, heldout={"every": 1, "samples": 8})
    await run(config, tmp_path / "run")
    steps = [row["step"] for row in read_lines(tmp_path / "run" / METRICS)]
    assert steps == sorted(steps)
    evaluated = [row["step"] for row in rows(tmp_path / "run", "heldout/version")]
    assert evaluated == [0, 1, 2]


@pytest.mark.engine
async def test_a_repeated_step_chooses_the_same_tasks(tmp_path: Path) -> None:
    """A run that lost its last checkpoints has the same results.

    Steps are repeated with the stored sessions. Numbers of versions are not used again.
    """
    plan = {"steps": 6, "tasks_per_step": 2, "samples": 2, "keep": 9, "staleness": 1}
    plan |= {"choose": "pass_rate", "checkpoint_every": 2}
    config, folder = write_config(tmp_path, schedule=plan, heldout=None), tmp_path / "run"
    first = (await run(config, folder)).state
    recorded = sorted((folder / "recordings").rglob("*"))
    for step in (4, 6):
        shutil.rmtree(folder / CHECKPOINTS / f"step-{step:06d}")
    second = (await run(config, folder)).state
    assert sorted((folder / "recordings").rglob("*")) == recorded
    assert (first.sessions, second.sessions) == (24, 24)
    assert (first.version, second.version) == (6, 11)
    published = [row["publish/version"] for row in rows(folder, "publish/version")]
    assert published == [1, 2, 8, 9, 10, 11]
    assert second.ledger == first.ledger
    assert (second.pass_rates, second.chosen) == (first.pass_rates, first.chosen)
    assert len(first.pass_rates) == 5
    assert sorted(first.chosen) == [7, 8]


@pytest.mark.engine
async def test_a_resumed_run_has_the_tasks_of_its_checkpoint(tmp_path: Path) -> None:
    """The tasks are not chosen again; here, their order in the checkpoint is reversed."""
    plan = {"steps": 1, "tasks_per_step": 2, "samples": 2, "staleness": 1, "choose": "pass_rate"}
    folder = tmp_path / "run"
    await run(write_config(tmp_path, schedule=plan, heldout=None), folder)
    path = checkpoint.path_of(folder / CHECKPOINTS, 1)
    state = checkpoint.read(path)
    assert sorted(state.extra["chosen"]) == ["2", "3"]
    chosen = {step: tasks[::-1] for step, tasks in state.extra["chosen"].items()}
    checkpoint.update(path, version=state.version, extra=state.extra | {"chosen": chosen})
    await run(write_config(tmp_path, schedule=plan | {"steps": 3}, heldout=None), folder)
    started = {path.name.rpartition("-")[0] for path in (folder / "recordings").rglob("g*.rec")}
    expected = [f"train{number}" for step in ("2", "3") for number in chosen[step]]
    assert {f"g{index:07d}-{name}" for index, name in enumerate(expected, 2)} < started
    assert len(started) == 6


def test_held_out_tasks_have_the_same_seeds_for_every_version(tmp_path: Path) -> None:
    """Only ids differ between versions; a task that is trained as well is refused."""
    settings = read_config(write_config(tmp_path), MODEL)
    batches = TaskBatches(settings, tmp_path)
    early, late = batches.evaluation(0), batches.evaluation(7)
    assert not {task.id for task in early} & {task.id for task in late}
    assert [t.sampling.seed for t in early] == [t.sampling.seed for t in late]
    trained = json.loads((tmp_path / "config.json").read_text())["tasks"]
    same = write_config(tmp_path, heldout=trained)
    with pytest.raises(ConfigError, match="heldout shares 5 instances with the training tasks"):
        TaskBatches(read_config(same, MODEL), tmp_path)


def test_a_resumed_run_may_have_other_addresses(tmp_path: Path) -> None:
    """Server and engines may have moved, but their addresses must be given again, as flags."""
    config, folder = write_config(tmp_path), tmp_path / "run"
    folder.mkdir()
    first = read_config(config, MODEL, server="http://a:1", engines=["http://b:1"])
    assert (first.server, first.engine.urls) == ("http://a:1", ("http://b:1",))
    store_config(folder, first)
    store_config(folder, read_config(config, MODEL, server="http://c:2", engines=["http://d:2"]))
    with pytest.raises(UsageError, match="other values of engine, server"):
        store_config(folder, read_config(config, MODEL))
    with pytest.raises(ConfigError, match=r"^--engine: urls\.0 is 'nonsense'"):
        read_config(config, MODEL, engines=["nonsense"])


REFUSED = [row for _, row in read_jsonl(Path(__file__).with_name("refused.jsonl"))]
"""Sections of a configuration, and a part of their error."""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["error"])
def test_wrong_sections_are_reported(tmp_path: Path, row: dict[str, Any]) -> None:
    """The error has the key, its value and what is allowed."""
    with pytest.raises(ConfigError, match=row["error"]):
        read_config(write_config(tmp_path, **row["sections"]), MODEL)
