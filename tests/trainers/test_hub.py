"""Published models have the names, types and files of the folder that they came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.models import HYBRID, KINDS, log_probabilities, make_kind
from support.tokenizer import make_tokenizer
from trainers.sessions import PROMPT, VERSION, groups, weights
from tugline.errors import ConfigError
from tugline.inference.load import load
from tugline.trainers.config import Lora
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.loading import WeightFiles, load_weights
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.lora import merge_adapter
from tugline.trainers.models import Placement, load_model, model_folder
from tugline.trainers.ranks import TrainerGroup

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
BF16 = torch.bfloat16


def make_source(folder: Path, kind: str, dtype: torch.dtype = BF16, **options: Any) -> Path:
    """Write a model folder as on the hub."""
    model = make_kind(kind).to(dtype)
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(make_tokenizer().to_json())
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: each for file in files for name, each in load_file(file).items()}


def make_trainer(source: Path, seed: int = 0, lora: Lora | None = None) -> Grpo:
    """Return a trainer of the model in a folder, before its first step."""
    config = GrpoConfig(lr=2e-2, tree_packing=False, seed=seed, replay_experts=False)
    model = load_model(source, Placement(torch.device("cpu")), lora).model
    return Grpo(model, config, source=source)


def train(source: Path, **options: Any) -> Grpo:
    """Return a trainer of the model in a folder, after a step."""
    trainer = make_trainer(source, **options)
    model = trainer.model
    report = trainer.step(groups(model, tasks=1, samples=4), version=VERSION)
    assert report.updates == 1
    return trainer


def publish(trainer: Grpo, folder: Path, dtype: str | None = None) -> Path:
    """Write the trained model."""
    assert trainer.source is not None
    with model_folder(trainer.source, folder) as draft:
        TrainerGroup(trainer).write_weights(draft, dtype)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_model_is_as_its_source(tmp_path: Path, kind: str) -> None:
    """Names, types, configuration and untrained weights are the source's; it loads like it."""
    source = make_source(tmp_path / "source", kind)
    trainer = train(source)
    result = publish(trainer, tmp_path / "model")
    before, after = read(source), read(result)
    assert list(before) == list(after)
    assert [t.dtype for t in before.values()] == [t.dtype for t in after.values()]
    assert (result / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (result / "tokenizer.json").exists()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if ".visual." in name}
    assert bool(kept) == (kind == "qwen3_5_with_images")

    mine, _, _ = load(result, dtype=torch.float32)
    assert torch.equal(weights(mine), weights(trainer.model).to(BF16).float())
    (architecture,) = json.loads((source / "config.json").read_text())["architectures"]
    theirs, found = getattr(transformers, architecture).from_pretrained(
        result, output_loading_info=True
    )
    assert not any(found.values())
    same = [theirs.get_parameter(name) for name in kept]
    assert all(map(torch.equal, same, [before[name] for name in kept]))


def test_a_tied_weight_that_is_stored_twice_is_written_twice(tmp_path: Path) -> None:
    """Both names get the trained values; transformers unties names whose values differ."""
    source = make_source(tmp_path / "source", "qwen3")
    stored = read(source)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    trainer = train(source)
    result = publish(trainer, tmp_path / "model")
    after = read(result)
    assert after.keys() == stored.keys()
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], stored["lm_head.weight"])
    model, _, _ = load(result, dtype=torch.float32)
    assert torch.equal(weights(model), weights(trainer.model).to(BF16).float())
    path = checkpoint.save(tmp_path, trainer, step=1, version=1)
    resumed = make_trainer(source, seed=1)
    checkpoint.load(path, resumed)
    assert torch.equal(weights(resumed.model), weights(trainer.model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_as_its_source_in_float32(tmp_path: Path, kind: str) -> None:
    """Trained weights are in float32, and training continues from the checkpoint with them."""
    source = make_source(tmp_path / "source", kind)
    trainer = train(source)
    path = checkpoint.save(tmp_path, trainer, step=1, version=1)
    before, after = read(source), read(path)
    assert list(before) == list(after)
    trained = {name for name in before if ".visual." not in name}
    assert {name for name in after if after[name].dtype == torch.float32} == trained
    assert (path / "config.json").read_bytes() == (source / "config.json").read_bytes()
    resumed = make_trainer(source, seed=1)
    assert not torch.equal(weights(resumed.model), weights(trainer.model))
    checkpoint.load(path, resumed)
    assert torch.equal(weights(resumed.model), weights(trainer.model))
    mine, _, _ = load(
        path if (path / "tokenizer.json").exists() else _complete(path), dtype=torch.float32
    )
    assert torch.equal(weights(mine), weights(trainer.model))


def _complete(path: Path) -> Path:
    shutil.copy(path.parent / "source" / "tokenizer.json", path)
    return path


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5_with_images"])
def test_a_merged_adapter_is_published_in_the_names_of_the_source(
    tmp_path: Path, kind: str
) -> None:
    """Weights without an adapter are copied bit for bit."""
    source = make_source(tmp_path / "source", kind)
    trainer = train(source, lora=Lora(rank=2, targets=("q_proj", "o_proj")))
    result = publish(trainer, tmp_path / "model")
    before, after = read(source), read(result)
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    adapted = ("self_attn.q_proj.weight", "self_attn.o_proj.weight")
    assert changed == {n for n in before if n.endswith(adapted) and ".visual." not in n}
    mine, _, _ = load(result, dtype=torch.float32)
    merged = merge_adapter(trainer.model)
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, merged[name].to(BF16).float())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_all_layers_is_merged(tmp_path: Path, kind: str) -> None:
    """The published model computes what the trainer computes, also with fused experts."""
    source = make_source(tmp_path / "source", kind)
    trainer = train(source, lora=Lora(rank=2))
    result = publish(trainer, tmp_path / "model", "float32")
    mine, _, _ = load(result, dtype=torch.float32)
    with torch.no_grad():
        after = log_probabilities(mine, PROMPT)
        before = log_probabilities(load(source, dtype=torch.float32)[0], PROMPT)
    assert float((before - after).abs().max()) > 1e-2
    assert float((torch.from_numpy(trainer.score(PROMPT)) - after).abs().max()) < 1e-4
    assert merge_adapter(trainer.model).keys() == mine.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_the_names_of_the_model_are_read(tmp_path: Path, kind: str) -> None:
    """Checkpoints of earlier versions have such names; a missing weight is an error."""
    model, _, _ = load(make_source(tmp_path / "source", kind), dtype=torch.float32)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(expected, tmp_path / "model.safetensors")
    for parameter in model.parameters():
        parameter.data.zero_()
    load_weights(tmp_path, model)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in expected.items())
    del expected["model.norm.weight"]
    save_file(expected, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"differ in 1 weights, such as model\.norm\.weight"):
        WeightFiles(tmp_path, model)


def test_files_and_types_are_those_of_the_source(tmp_path: Path) -> None:
    """With several files there is an index; each weight has its own type unless one is set."""
    source = make_source(tmp_path / "source", "qwen3_moe", max_shard_size="40KB")
    first = next(iter(sorted(source.glob("*.safetensors"))))
    tensors = load_file(first)
    wide = next(iter(tensors))
    save_file(tensors | {wide: tensors[wide].float()}, first, metadata={"format": "pt"})
    trainer = train(source)
    result = publish(trainer, tmp_path / "model")
    assert len([*source.glob("*.safetensors")]) > 1
    for file in source.glob("*.safetensors"):
        before, after = load_file(file), load_file(result / file.name)
        assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    old, new = (
        json.loads((each / "model.safetensors.index.json").read_text())["weight_map"]
        for each in (source, result)
    )
    assert old == new
    mine, _, _ = load(publish(trainer, tmp_path / "wide", "float32"), dtype=torch.float32)
    assert torch.equal(weights(mine), weights(trainer.model))


def test_a_source_that_stores_tied_weights_twice_gets_both(tmp_path: Path) -> None:
    """Each copy has the trained values."""
    source = make_source(tmp_path / "source", "qwen3")
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    both = tensors | {"lm_head.weight": embedding.clone()}
    save_file(both, source / "model.safetensors", metadata={"format": "pt"})
    after = read(publish(train(source), tmp_path / "model"))
    assert after.keys() == both.keys()
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], embedding)


def test_a_source_without_a_trained_weight_is_refused(tmp_path: Path) -> None:
    """A missing weight is an error that names it, before training."""
    source = make_source(tmp_path / "source", "qwen3")
    model, _, _ = load(source, dtype=torch.float32)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 weights .* such as model\.norm\.weight"):
        Grpo(model, GrpoConfig(), source=source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"source has no readable \*\.safetensors"):
        Grpo(model, GrpoConfig(), source=source)


def test_hybrid_kinds_have_gated_delta_net_layers() -> None:
    """`HYBRID`, which other tests use, has all kinds with such layers and no others."""
    linear = [name for name in KINDS if "linear_attn" in " ".join(make_kind(name).state_dict())]
    assert tuple(linear) == HYBRID
