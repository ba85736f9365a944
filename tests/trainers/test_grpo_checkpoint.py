"""Checkpoints: exact resumption, damage, and atomic writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.control_plane import limited_files
from trainers.sessions import groups, tiny, weights
from tugline.errors import CheckpointError
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import Grpo

CONFIG = GrpoConfig(
    lr=1e-3, sessions_per_update=3, warmup_updates=2, decay_updates=7, weight_decay=0.1
)


def trainer(seed: int = 0) -> Grpo:
    """A new trainer of a small random model."""
    return Grpo(tiny(seed), CONFIG)


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """One step, a save, a load into another trainer, and two steps equal three steps."""
    batch = groups(tiny())
    straight = trainer()
    for version in range(3):
        straight.step(batch, version=version)
    first = trainer()
    first.step(batch, version=0)
    path = checkpoint.save(tmp_path, first, step=1, version=1, extra={"row": 7})
    resumed = trainer(seed=99)
    state = checkpoint.load(path, resumed)
    assert (state.step, state.version, state.extra) == (1, 1, {"row": 7})
    for version in (1, 2):
        resumed.step(batch, version=version)
    assert torch.equal(weights(straight.model), weights(resumed.model))
    assert straight.updates == resumed.updates


def test_a_checkpoint_is_as_of_its_start(tmp_path: Path) -> None:
    """Updates that are made while a checkpoint is written are not in it."""
    batch = groups(tiny())
    first = trainer()
    first.step(batch, version=0)
    before = weights(first.model)
    saving = checkpoint.start(tmp_path, first, step=1, version=1)
    assert checkpoint.latest(tmp_path) is None
    first.step(batch, version=1)
    saving.write()
    resumed = trainer(seed=9)
    checkpoint.load(saving.path, resumed)
    assert torch.equal(weights(resumed.model), before)
    resumed.step(batch, version=1)
    assert torch.equal(weights(resumed.model), weights(first.model))


def test_a_checkpoint_before_the_first_update_has_no_moments(tmp_path: Path) -> None:
    """Training continues from it as from the start."""
    path = checkpoint.save(tmp_path, trainer(), step=0, version=0)
    resumed = trainer(seed=9)
    checkpoint.load(path, resumed)
    straight = trainer()
    for each in (resumed, straight):
        each.step(groups(tiny()), version=0)
    assert torch.equal(weights(resumed.model), weights(straight.model))


def test_other_tools_can_read_the_model(tmp_path: Path) -> None:
    """A checkpoint is a model folder of Hugging Face."""
    mine = trainer()
    path = checkpoint.save(tmp_path, mine, step=1, version=1)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(weights(mine.model), weights(theirs))


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    """The last `keep` checkpoints stay."""
    assert checkpoint.latest(tmp_path) is None
    for step in range(4):
        checkpoint.save(tmp_path, trainer(), step=step, version=step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000003"


def test_incomplete_checkpoints_are_ignored(tmp_path: Path) -> None:
    """A folder left by a crash is not the latest checkpoint, and does not prevent a save."""
    whole = checkpoint.save(tmp_path, trainer(), step=1, version=1)
    (tmp_path / ".step-000002.part").mkdir()
    (tmp_path / ".step-000002.part" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-000009").mkdir()
    assert checkpoint.latest(tmp_path) == whole
    assert checkpoint.save(tmp_path, trainer(), step=2, version=2).name == "step-000002"
    with pytest.raises(CheckpointError, match=r"step-000009 is not complete"):
        checkpoint.load(tmp_path / "step-000009", trainer())


def test_an_existing_step_is_not_overwritten(tmp_path: Path) -> None:
    """A second run in the same folder cannot replace the checkpoint of a step."""
    checkpoint.save(tmp_path, trainer(), step=1, version=1)
    with pytest.raises(CheckpointError, match=r"step-000001 exists"):
        checkpoint.save(tmp_path, trainer(seed=1), step=1, version=1)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.moments", "config.json"])
def test_damaged_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    """A checkpoint with a flipped bit or a missing file is refused, and nothing is loaded."""
    trained = trainer()
    trained.step(groups(tiny()), version=0)
    path = checkpoint.save(tmp_path, trained, step=1, version=1)
    file = path / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    other = trainer(seed=5)
    before = weights(other.model)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        checkpoint.load(path, other)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        checkpoint.load(path, other)
    assert torch.equal(before, weights(other.model))


@pytest.mark.parametrize("allowed", [1_000, 60_000, 100_000])
def test_a_full_disk_leaves_no_partial_checkpoint(tmp_path: Path, allowed: int) -> None:
    """No partial checkpoint is left, whichever file cannot be written."""
    trained = trainer()
    trained.step(groups(tiny()), version=0)
    whole = checkpoint.save(tmp_path, trained, step=1, version=1)
    sizes = {file.name: file.stat().st_size for file in whole.iterdir()}
    assert sizes["model.safetensors"] < 100_000 < sizes["optimizer.moments"]
    message = "step-000002 cannot be written"
    with limited_files(allowed), pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path, trained, step=2, version=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    checkpoint.load(whole, trained)
