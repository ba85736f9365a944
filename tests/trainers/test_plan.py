"""The plan of a training: its formulas against measured memory, its times, and its advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from fake_memory import MODELS, Case, make_settings
from fake_memory import measure as measure_fake
from fake_memory import plan as plan_fake
from msgspec.structs import replace

from trainers.plan_ranks import CASES, measure, plan, work
from tugline.errors import ConfigError
from tugline.schema import decode
from tugline.trainers.config import Lora, TrainConfig
from tugline.trainers.plan.estimate import GIB, Assumptions, Layout, Session
from tugline.trainers.plan.run import TrainingPlan, plan_training
from tugline.trainers.plan.shape import read_shape

SESSION = Session(tokens=39_000, sampled=9000, other_s=100.0, recording=120_000)
SLOW = pytest.mark.slow
FOUR = Layout(ranks=4, engines=4, share=None, gpu_memory=80 * GIB, price=3.0)


# --------------------------------------------------------------------------- memory
@pytest.mark.parametrize(
    # bfloat16 takes half a minute without a processor's instructions for it
    "case",
    [pytest.param(case, marks=SLOW if case == "bfloat16" else ()) for case in CASES],
)
def test_planned_memory_is_that_of_an_update(case: str) -> None:
    """The formulas are within 10 % of what torch measures on the real tensors of a tiny model."""
    planned = plan(CASES[case], 1).total
    assert planned == pytest.approx(measure(CASES[case], 1), rel=0.1)


@SLOW
@pytest.mark.timeout(500)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_planned_memory_is_that_of_a_rank(world: int, tmp_path: Path) -> None:
    """The formulas are within 10 % for shards on processes that talk by gloo."""
    mp.spawn(work, args=(world, tmp_path), nprocs=world)
    found = json.loads((tmp_path / "found.json").read_text())
    planned = {name: plan(changes, world).total for name, changes in CASES.items()}
    assert planned == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("qwen3-4b", layers=2, tokens=16_384), marks=SLOW),
        pytest.param(Case("qwen3-8b", layers=3, tokens=16_384, offload=True), marks=SLOW),
        pytest.param(Case("qwen3-4b", layers=2, tokens=4096, lora=True, ranks=1), marks=SLOW),
        Case("qwen3.5-4b", layers=4, tokens=16_384),
    ],
    ids=str,
)
def test_planned_memory_at_full_width(case: Case) -> None:
    """The formulas are within 5 % of the trainer's own update on fake tensors of real widths."""
    assert make_settings(case).gradient_checkpointing
    planned = plan_fake(case)
    measured = measure_fake(case)
    assert planned.total == pytest.approx(measured.gpu, rel=0.05)
    assert planned.host == pytest.approx(measured.host, rel=0.05)


# --------------------------------------------------------------------------- shapes
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
    return folder


def test_parameters_are_counted_without_weights(models: Path) -> None:
    """The counts are those that the published models state."""
    dense = read_shape(models / "qwen3-8b")
    assert dense.weights == 8_190_735_360
    assert dense.trained == dense.weights
    hybrid = read_shape(models / "qwen3.5-4b", Lora())
    assert hybrid.adapted
    assert hybrid.tied
    assert hybrid.trained < hybrid.weights / 100
    assert [layer.queries > 0 for layer in hybrid.layers] == [False, False, False, True] * 8


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """The error names the folder and the file that it needs."""
    with pytest.raises(ConfigError, match=r"has no readable config\.json"):
        read_shape(tmp_path)


# --------------------------------------------------------------------------- plans
def make_config(models: Path, model: str, **changes: Any) -> TrainConfig:
    """Make the configuration of a run of 65,536 tokens on several GPUs."""
    values: dict[str, Any] = {
        "model": str(models / model),
        "tasks": {"taskset": {"name": "swe"}},
        "template": {"harness": {"name": "pi", "options": {"context_window": 65_536}}},
        "engine": {"urls": ["http://127.0.0.1:8000"] * 4},
        "node": {"slots": 64},
        "fsdp": True,
        "publish_folder": "/dev/shm",  # noqa: S108 - where users should put it
        "grpo": {"autocast": "bfloat16"},
        "schedule": {"steps": 10, "tasks_per_step": 4, "samples": 16},
    }
    return decode(values | changes, TrainConfig)


def plan_model(models: Path, model: str, layout: Layout = FOUR, **changes: Any) -> TrainingPlan:
    """Plan a run."""
    return plan_training(make_config(models, model, **changes), layout, SESSION)


def test_the_published_experiment_fits_eight_gpus(models: Path) -> None:
    """Qwen3.5-4B trains traces of 65,536 tokens on four GPUs of 80 GiB beside four engines."""
    planned = plan_model(models, "qwen3.5-4b")
    assert planned.fits
    assert planned.change is None
    assert planned.memory.total < 72 * GIB
    assert planned.pass_tokens == 65_536
    assert planned.tokens == {"sampled": 64 * 9000, "trained": 64 * 39_000}
    assert planned.engine.sessions > 16


def test_a_change_that_makes_it_fit_is_named(models: Path) -> None:
    """The advice, applied, makes the run fit; the cheapest comes first."""
    planned = plan_model(models, "qwen3-8b", grpo={"autocast": "bfloat16", "micro_tokens": 131_072})
    assert not planned.fits
    assert planned.change == "--set grpo.offload_activations=true"
    grpo = {"autocast": "bfloat16", "micro_tokens": 131_072, "offload_activations": True}
    assert plan_model(models, "qwen3-8b", grpo=grpo).fits


def test_more_gpus_are_named_if_no_setting_helps(models: Path) -> None:
    """A model of 32 billion weights needs more than four GPUs or an adapter."""
    planned = plan_model(models, "qwen3-32b")
    assert not planned.fits
    assert planned.change is not None
    assert "--ranks" in planned.change or "lora" in planned.change


def test_an_engine_takes_its_share_of_a_gpu(models: Path) -> None:
    """An adapter of a small model trains beside an engine on one GPU."""
    one = Layout(ranks=1, engines=1, share=0.4, gpu_memory=80 * GIB)
    changes = {"lora": {}, "fsdp": False, "window": 16_384}
    planned = plan_model(models, "qwen3-4b", one, **changes)
    assert planned.fits
    assert planned.layout.gpus == 1
    assert planned.needed == planned.memory.total + planned.reserve + 32 * GIB
    assert not plan_model(models, "qwen3-4b", replace(one, share=0.9), **changes).fits


def test_time_and_cost_follow_from_the_speeds(models: Path) -> None:
    """Twice the operations a second halve the passes; steps add up, and cost follows the hours."""
    planned = plan_model(models, "qwen3-8b")
    assert planned.step_s == pytest.approx(sum(planned.seconds.values()))
    assert planned.hours == pytest.approx(planned.step_s * 10 / 3600)
    assert planned.cost == pytest.approx(planned.hours * 8 * 3.0)
    config = make_config(models, "qwen3-8b")
    fast = Assumptions(flops=2 * Assumptions().flops)
    seconds = plan_training(config, FOUR, SESSION, fast).seconds
    assert seconds["backward"] == pytest.approx(planned.seconds["backward"] / 2)
    assert seconds["publishing"] == planned.seconds["publishing"]


def test_sampling_beside_training_hides_the_shorter(models: Path) -> None:
    """With staleness, a step takes as long as the longer of both."""
    schedule = {"steps": 10, "tasks_per_step": 4, "samples": 16, "staleness": 1}
    planned = plan_model(models, "qwen3-8b", schedule=schedule)
    sampling = planned.seconds["sampling"]
    assert planned.step_s == pytest.approx(max(sampling, sum(planned.seconds.values()) - sampling))


def test_weights_are_published_through_storage_between_machines(models: Path) -> None:
    """Sixteen GPUs are two machines, which share no memory."""
    two = replace(FOUR, ranks=8, engines=8)
    one = plan_model(models, "qwen3-8b").seconds["publishing"]
    assert plan_model(models, "qwen3-8b", two).seconds["publishing"] == pytest.approx(2 * one)
    on_disk = plan_model(models, "qwen3-8b", publish_folder=None)
    assert on_disk.seconds["publishing"] == pytest.approx(2 * one)
    assert on_disk.disk["published weights"] == 4 * on_disk.weights
    assert on_disk.host["published weights"] == 0
