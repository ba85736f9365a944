"""Tokens, CPU time and gradient with tree packing and without.

``python benchmarks/training/tree_packing.py`` packs eight sessions that share a prompt, for several
prompt lengths. CPU seconds are those of a forward and backward pass on one thread.
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.packing import Costs, pack
from tugline.types import Ids, Sample

VOCABULARY = 1400
OWN = 400
"""Mean tokens of a session after the shared prompt; a quarter of them is trained."""


def main() -> None:
    """Print one line per length of the shared prompt."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("shared", nargs="*", type=int, default=[300, 2000, 6000])
    parser.add_argument("--sessions", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| shared | tokens | ratio | CPU-s forward + backward | max gradient difference |")
    print("|---|---|---|---|---|")
    for shared in options.shared:
        samples = make_sessions(options.sessions, shared)
        plain, slow, gradient = measure(samples, tree=False)
        packed, fast, other = measure(samples, tree=True)
        worst = float((gradient - other).abs().max())
        print(
            f"| {shared:,} | {plain:,} -> {packed:,} | {plain / packed:.1f} "
            f"| {slow:.2f} -> {fast:.2f} | {worst:.1e} |"
        )


def make_sessions(count: int, shared: int) -> list[Sample]:
    """Make sessions of random ids that begin with the same `shared` ids."""
    rng = np.random.default_rng(0)

    def text(length: int) -> Ids:
        return rng.integers(0, VOCABULARY, length).astype(np.int32)

    prompt = text(shared)
    samples = []
    for number in range(count):
        ids = np.concatenate([prompt, text(int(rng.integers(OWN // 2, 3 * OWN // 2)))])
        mask = (np.arange(len(ids)) > shared) & (rng.random(len(ids)) < 0.25)
        samples.append(
            Sample(
                input_ids=ids,
                loss_mask=mask,
                logprobs=np.zeros(len(ids), np.float32),
                versions=np.zeros(len(ids), np.int32),
                advantages=np.where(mask, rng.normal(size=len(ids)), 0).astype(np.float32),
                temperatures=np.ones(len(ids), np.float32),
                group="g",
                session=str(number),
            )
        )
    return samples


def measure(samples: list[Sample], *, tree: bool) -> tuple[int, float, torch.Tensor]:
    """Return computed tokens, CPU seconds, and the gradient of a policy loss."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
        )
    )
    config = GrpoConfig(tree_packing=tree)
    policy = PolicyModel(model, config)
    total = sum(sample.trained for sample in samples)
    rows = [Row(sample, 1 / total) for sample in samples]
    tokens = 0
    began = time.process_time()
    for micro in pack(rows, config, policy.device, Costs()):
        tokens += micro.computed - micro.padding
        loss = -(policy.logprobs(micro) * micro.advantage * micro.weight).sum()
        loss.backward()
    spent = time.process_time() - began
    return tokens, spent, torch.cat([p.grad.flatten() for p in model.parameters()])


if __name__ == "__main__":
    main()
