"""Mismatch between an engine and a trainer of several precisions, dense and with experts.

    python benchmarks/training/precision.py [--sequences 48] [--tokens 200] [--noise 0.5]

The demo's model, and a mixture of eight experts made of it (each is its feed-forward network with
noise; a token takes two), answer in the embedded engine at temperature 1 in float32, bfloat16 and
float16. The trainer recomputes the tokens in float32 and in bfloat16 (`autocast`), those of the
mixture with the recorded experts and with the choice of its own routers. Printed are the
distribution of the difference, and the share of tokens whose importance weight is bounded with the
default bounds and with those of IcePop (0.5 and 5).
"""

# ruff: noqa: INP001, T201 - a script that prints
import argparse
import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tugline.demo.run import WARM_START
from tugline.inference.base import GenerateRequest, SampledChunk, join
from tugline.inference.engine import Engine
from tugline.trainers.grpo.batch import MicroBatch, Row
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.packing import pack
from tugline.trainers.grpo.update import Mismatch
from tugline.types import Ids, Sample

PROMPT = 60
EXPERTS = 8
ENGINE_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Measured(NamedTuple):
    """Differences of a trainer from an engine, in nats, and of its routers' choice."""

    differences: np.ndarray
    changed: list[float] | None
    """Share of tokens whose recorded experts are others than the routers', by layer."""


def make_dense() -> PreTrainedModel:
    """Return the demo's model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(WARM_START, dtype=torch.float32)
    return model


def make_mixture(noise: float) -> PreTrainedModel:
    """Return a Qwen3-MoE whose experts are the dense model's layers with relative noise."""
    dense = make_dense()
    values = dense.config.to_dict() | {
        "moe_intermediate_size": dense.config.intermediate_size,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "architectures": None,
    }
    del values["model_type"], values["dtype"]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, old in zip(model.model.layers, dense.model.layers, strict=True):
            both = torch.cat((old.mlp.gate_proj.weight, old.mlp.up_proj.weight))
            weights = ((layer.mlp.experts.gate_up_proj, both),)
            weights += ((layer.mlp.experts.down_proj, old.mlp.down_proj.weight),)
            for weight, source in weights:
                weight.copy_(source * (1 + noise * torch.randn_like(weight)))
            layer.mlp.gate.weight.normal_(std=0.1)
    return model


# --------------------------------------------------------------------------- sampling
async def answer(engine: Engine, ids: Ids, tokens: int, seed: int) -> SampledChunk:
    """Return a whole answer."""
    request = GenerateRequest(prompt_ids=ids, max_tokens=tokens, seed=seed, ignore_eos=True)
    return join([chunk async for chunk in engine.generate(request)])


async def sample(
    model: PreTrainedModel, dtype: torch.dtype, sequences: int, tokens: int
) -> list[Sample]:
    """Return answers of an engine that computes in `dtype`."""
    served = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]  # its stub is of a wrapper
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, model.config.vocab_size, (sequences, PROMPT)).astype(np.int32)
    length = PROMPT + tokens
    async with Engine(served, eos_ids=[], max_model_len=length, threads=1) as engine:
        answers = await asyncio.gather(
            *(answer(engine, ids, tokens, seed) for seed, ids in enumerate(prompts))
        )
    return [make_sample(ids, each) for ids, each in zip(prompts, answers, strict=True)]


def make_sample(prompt: Ids, sampled: SampledChunk) -> Sample:
    """Return an answer as a sample whose sampled tokens are trained."""
    ids = np.concatenate([prompt, sampled.ids])
    logprobs = np.concatenate([np.zeros(len(prompt), np.float32), sampled.logprobs])
    return Sample(
        input_ids=ids,
        loss_mask=np.arange(len(ids)) >= len(prompt),
        logprobs=logprobs,
        versions=np.zeros(len(ids), np.int32),
        advantages=np.zeros(len(ids), np.float32),
        temperatures=np.ones(len(ids), np.float32),
        group="",
        session="",
        experts=sampled.experts,
    )


# --------------------------------------------------------------------------- training
@torch.no_grad()
def recompute(policy: PolicyModel, samples: Sequence[Sample], *, replay: bool) -> Measured:
    """Return the differences of the trainer's log probabilities from the captured ones."""
    parts = []
    for micro in list_passes(policy, samples):
        used = micro if replay else replace(micro, experts=None)
        parts.append((policy.logprobs(used) - micro.behaviour).double().numpy())
        policy.routes.compare(used.experts)
    return Measured(np.concatenate(parts), policy.routes.take_shares(policy.device))


def list_passes(policy: PolicyModel, samples: Sequence[Sample]) -> Iterator[MicroBatch]:
    """Yield the forward passes of samples."""
    yield from pack([Row(each) for each in samples], policy.config, policy.device, policy.costs)


def describe(measured: Measured) -> str:
    """Return the cells of a row."""
    found = Mismatch.of(measured.differences)
    weights = np.exp(measured.differences)
    changed = "" if measured.changed is None else f"{max(measured.changed):.1%}"
    cells = (
        f"{found.mean_abs:.1e}",
        f"{found.p99_abs:.1e}",
        f"{found.share_large:.1%}",
        f"{found.effective_sample_size:.4f}",
        f"{(weights > 2).mean():.2%}",
        f"{((weights < 0.5) | (weights > 5)).mean():.2%}",
        changed,
    )
    return " | ".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--noise", type=float, default=0.5)
    given = parser.parse_args()
    print("| model | engine | trainer | experts | mean | p99 | over 0.05 | ESS | over 2 |", end="")
    print(" out of 0.5 to 5 | routers differ |\n" + "|---" * 11 + "|")
    for name, model in (("dense", make_dense()), ("experts", make_mixture(given.noise))):
        for dtype in ENGINE_TYPES:
            samples = asyncio.run(sample(model, dtype, given.sequences, given.tokens))
            for autocast in (None, "bfloat16"):
                policy = PolicyModel(copy.deepcopy(model), UpdateConfig(autocast=autocast))
                for replay in (True, False) if name == "experts" else (False,):
                    experts = {(True): "replayed", (False): "own"}[replay]
                    experts = experts if name == "experts" else ""
                    about = (name, str(dtype)[6:], autocast or "float32", experts)
                    cells = describe(recompute(policy, samples, replay=replay))
                    print(f"| {' | '.join(about)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
