"""Tests that need a GPU: attention over ragged paths, and the engine beside the trainer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM

from support.models import make_qwen3
from trainers import ranks
from trainers.sessions import run_policy, sample, tiny, weights
from tugline.inference.base import GenerateRequest, join
from tugline.inference.engine import Engine
from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import shard
from tugline.trainers.grpo.forward import PolicyModel, make_probe
from tugline.trainers.grpo.packing import Costs, pack
from tugline.types import Ids, Sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VOCABULARY = 512
BFLOAT16_LOGPROB = 0.1
"""Nats that one token may differ by between two attention kernels in bfloat16."""


def small() -> Qwen3ForCausalLM:
    """Random weights with grouped heads, on the GPU in float32."""
    model = make_qwen3(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.1,  # large enough that a wrong context changes the results
    )
    return model.cuda().eval()


def forked() -> list[Sample]:
    """Four pairs of rows that share 900 ids; the first of a pair is a prefix of the second."""
    rng = np.random.default_rng(0)

    def text(length: int) -> Ids:
        return rng.integers(0, VOCABULARY, length).astype(np.int32)

    prompt, samples = text(900), []
    for number in range(4):
        first = np.concatenate([prompt, text(50 + 37 * number)])
        for ids in (first, np.concatenate([first, text(130)])):
            mask = (np.arange(len(ids)) >= 900) & (rng.random(len(ids)) < 0.5)
            advantages = np.where(mask, rng.normal(size=len(ids)), 0).astype(np.float32)
            samples.append(sample(ids, mask, advantages=advantages))
    return samples


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_trees_give_the_results_of_separate_rows(
    autocast: str | None, *, checkpointed: bool
) -> None:
    """Attention is computed run by run in float32, and by `varlen_attn` in bfloat16."""
    options = {"autocast": autocast, "gradient_checkpointing": checkpointed}
    plain, tree = (
        run_policy(small(), forked(), GrpoConfig(tree_packing=packed, **options))
        for packed in (False, True)
    )
    assert tree.tokens < plain.tokens / 3
    difference = np.abs(np.concatenate(plain.logprobs) - np.concatenate(tree.logprobs))
    gradient, other = plain.gradient, tree.gradient
    cosine = torch.nn.functional.cosine_similarity(gradient.double(), other.double(), dim=0).item()
    ratio = (other.norm() / gradient.norm()).item()
    print(  # noqa: T201 - figures for docs/benchmarks.md, shown with -s
        f"{autocast}: {plain.tokens} -> {tree.tokens} tokens, max {difference.max():.1e} mean"
        f" {difference.mean():.1e} nats, gradient cosine {cosine:.7f} ratio {ratio:.6f}"
    )
    if autocast is None:
        assert difference.max() < 1e-4
        assert (gradient - other).abs().max().item() < 1e-4 * gradient.abs().max().item()
    else:
        assert difference.max() < BFLOAT16_LOGPROB
        assert cosine > 0.999
        assert abs(ratio - 1) < 0.01


async def test_engine_and_trainer_have_the_same_log_probabilities() -> None:
    """Engine and trainer agree in float32 on a batch of prompts with a common prefix."""
    model = small()
    rng = np.random.default_rng(1)
    shared = rng.integers(3, VOCABULARY, 300).astype(np.int32)
    engine = Engine(model, eos_ids=[2], max_model_len=2048, max_running=8)
    worst, rows = 0.0, []
    async with engine:
        for number in range(6):
            tail = rng.integers(3, VOCABULARY, 10 + 40 * number).astype(np.int32)
            prompt = np.concatenate([shared, tail])
            request = GenerateRequest(prompt_ids=prompt, max_tokens=64, ignore_eos=True)
            async with contextlib.aclosing(engine.generate(request)) as chunks:
                rows.append((prompt, join([chunk async for chunk in chunks])))
    config = GrpoConfig(micro_tokens=4096)
    policy = PolicyModel(model, config)
    for prompt, output in rows:
        row = Row(make_probe(np.concatenate([prompt, output.ids])))
        for micro in pack([row], config, policy.device, Costs()):
            with torch.no_grad():
                new = policy.logprobs(micro).cpu().numpy()[-len(output.ids) :]
        worst = max(worst, float(np.abs(new - output.logprobs).max()))
    print(f"engine against trainer: {worst:.1e} nats")  # noqa: T201 - as above
    assert worst < 1e-4


def test_a_model_sharded_over_nccl_has_the_same_weights(tmp_path: Path) -> None:
    """Five steps in a group of one process, one step not finite, give the unsharded weights."""
    plain = tiny().cuda()
    reports = ranks.train(plain, ranks.CONFIG, slice(None))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        sharded = tiny().cuda()
        shard(sharded)
        others = ranks.train(sharded, ranks.CONFIG, slice(None))
        difference = (weights(plain) - weights(sharded)).abs().max().item()
    finally:
        dist.destroy_process_group()
    print(f"weights after five steps: {difference:.1e} apart")  # noqa: T201 - as above
    assert difference < 1e-5
    for report, other in zip(reports, others, strict=True):
        assert report.loss == pytest.approx(other.loss, abs=1e-5)
        assert report.updates_skipped == other.updates_skipped
