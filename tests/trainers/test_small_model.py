"""The example with a real small model, on a CPU: conversion, fine-tuning and a training step."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from support.commands import run_program
from tugline.sandbox.cache import cache_folder
from tugline.trainers.sinks import METRICS, read_lines

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
TUGLINE = str(Path(PYTHON).with_name("tugline"))
EXAMPLE = Path("examples", "small_model")


def run(folder: Path, *line: str, **env: str) -> None:
    """Run a command that must succeed."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    done = run_program(*line, cwd=folder, env=variables, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def fetch_model(scratch: Path) -> Path:
    """The model folder of `fetch_model.py`, cached."""
    model = cache_folder() / "models" / "smollm2-135m"
    if not model.exists():
        pip = (PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
        run(scratch, *pip, str(scratch / "gguf"), "gguf>=0.17")
        script, draft = str(ROOT / EXAMPLE / "fetch_model.py"), scratch / "made"
        run(scratch, PYTHON, script, str(draft), PYTHONPATH=str(scratch / "gguf"))
        model.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(draft, model)
    return model


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_real_model_is_fine_tuned_and_trained(tmp_path: Path) -> None:
    """Shorter runs with the files of the example fine-tune and train a real model."""
    shutil.copytree(ROOT / EXAMPLE, tmp_path / EXAMPLE)
    (tmp_path / EXAMPLE / "model").symlink_to(fetch_model(tmp_path))
    run(tmp_path, PYTHON, str(EXAMPLE / "make_tasks.py"))
    config = yaml.safe_load((tmp_path / EXAMPLE / "sft.yaml").read_text())
    config["sft"]["epochs"] = 2
    (tmp_path / EXAMPLE / "sft.yaml").write_text(yaml.safe_dump(config))
    run(tmp_path, TUGLINE, "sft", str(EXAMPLE / "sft.yaml"), "--out", "runs/small-sft")
    lines = read_lines(tmp_path / "runs/small-sft" / METRICS)
    losses = [line["sft/heldout_loss"] for line in lines if "sft/heldout_loss" in line]
    assert losses[-1] < losses[0] / 3

    config = yaml.safe_load((tmp_path / EXAMPLE / "train.yaml").read_text())
    config["schedule"] |= {"steps": 1, "tasks_per_step": 4, "samples": 2}
    config["heldout"]["select"] = {"limit": 4}
    config["node"]["slots"] = 8
    (tmp_path / EXAMPLE / "train.yaml").write_text(yaml.safe_dump(config))
    run(tmp_path, TUGLINE, "train", str(EXAMPLE / "train.yaml"), "--out", "runs/small")
    lines = read_lines(tmp_path / "runs/small" / METRICS)
    merged = {key: value for line in lines for key, value in line.items()}
    assert (merged["rollout/sessions"], merged["rollout/failed"]) == (8, 0)
    assert merged["heldout/attempts"] == 4
    assert merged["publish/max_abs_dlogprob"] < 2e-4
