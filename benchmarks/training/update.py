"""One update of the trainer beside a loop that one would write by hand.

    python benchmarks/training/update.py [--rounds 3]

Two sequences of 4,096 tokens, all but the first 96 of them trained, and a small model with the
vocabulary of Qwen3 (151,936), so that the output layer dominates. The loop makes a forward and a
backward pass for each sequence, with the clipped policy loss over whole logits. Each runs in a
process of its own, in turns; reported are CPU time and peak memory of the update.
"""

# ruff: noqa: INP001, T201 - a script that prints
import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
import transformers

from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import Grpo
from tugline.types import Sample

LENGTH = 4096
PROMPT = 96
LR = 1e-6


def make_model() -> transformers.Qwen3ForCausalLM:
    """Return a model of 85 million weights, 78 million of them in the vocabulary."""
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=151_936,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=LENGTH,
        )
    )


def make_samples() -> list[Sample]:
    """Return two sequences without a common prefix, with the log probability of a uniform model."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(2):
        mask = np.arange(LENGTH) >= PROMPT
        samples.append(
            Sample(
                input_ids=rng.integers(0, 151_936, LENGTH).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -np.log(151_936), 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, 1.0 - 2 * number, 0).astype(np.float32),
                temperatures=np.ones(LENGTH, np.float32),
                group="group",
                session=str(number),
            )
        )
    return samples


def update_by_hand(model: transformers.Qwen3ForCausalLM, samples: Sequence[Sample]) -> None:
    """Make an update as one would write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    total = sum(int(sample.loss_mask.sum()) for sample in samples)
    for sample in samples:
        ids = torch.as_tensor(sample.input_ids, dtype=torch.long)[None]
        mask = torch.as_tensor(sample.loss_mask)[1:]
        old = torch.as_tensor(sample.logprobs)[1:]
        advantage = torch.as_tensor(sample.advantages)[1:]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        new = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        ratio = torch.exp(new - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        ((loss * mask).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def update_by_trainer(model: transformers.Qwen3ForCausalLM, samples: Sequence[Sample]) -> None:
    """Make the update with the trainer."""
    trainer = Grpo(model, GrpoConfig(lr=LR))
    trainer.apply([Row(sample, 1 / sum(s.trained for s in samples)) for sample in samples])


def measure(name: str, results: "multiprocessing.Queue[dict[str, float]]") -> None:
    """Measure an update in this process."""
    torch.set_num_threads(1)
    model = make_model()
    samples = make_samples()
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.process_time()
    (update_by_hand if name == "loop" else update_by_trainer)(model, samples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
    results.put({"cpu_s": time.process_time() - began, "peak_gib": peak / 2**20})


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="One update beside a hand-written loop.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    measured: dict[str, list[dict[str, float]]] = {"loop": [], "trainer": []}
    for _ in range(options.rounds):
        for name, figures in measured.items():
            results = context.Queue()
            process = context.Process(target=measure, args=(name, results))
            process.start()
            figures.append(results.get(timeout=600))
            process.join()
    if options.json:
        print(json.dumps(measured))
        return
    middle = {
        name: {key: statistics.median(one[key] for one in each) for key in ("cpu_s", "peak_gib")}
        for name, each in measured.items()
    }
    for name, each in middle.items():
        times = ", ".join(f"{one['cpu_s']:.1f}" for one in measured[name])
        print(f"{name:<8} {each['cpu_s']:6.1f} CPU-s ({times}), +{each['peak_gib']:.2f} GiB")
    ratios = {key: middle["trainer"][key] / middle["loop"][key] for key in ("cpu_s", "peak_gib")}
    print(f"ratio    {ratios['cpu_s']:6.2f}, memory {ratios['peak_gib']:.2f}")


if __name__ == "__main__":
    main()
