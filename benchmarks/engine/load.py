"""The same multi-turn load on the embedded engine and on transformers' continuous batching.

The sessions of a GRPO group share a long prompt (system prompt and tools); then each extends its
own conversation turn by turn. Both engines get the same tiny Qwen3, the same sessions, one thread
and equal KV memory. Answers have a fixed length, so that both do the same work. Block sharing is
off in transformers, because it gives wrong log probabilities after a weight swap.

    python benchmarks/engine/load.py [--sessions 8] [--turns 2] [--json out.json]
"""

# ruff: noqa: INP001, T201 - a script that prints
from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tugline.inference.base import GenerateRequest
from tugline.inference.engine import Engine
from tugline.types import Ids

VOCAB = 1500
WINDOW = 4096
WAIT_S = 300.0
HEAD = f"{'engine':<14}{'run':>4}{'new tok/s':>11}{'first token s':>15}{'max error':>11}"


@dataclass(frozen=True)
class Load:
    """The sessions to play; lengths are in tokens."""

    sessions: int
    turns: int
    group: int = 8
    shared: int = 1480
    task: int = 30
    tail: int = 60
    answer: int = 40

    def prompt(self, session: int, run: int) -> Ids:
        """Make the first prompt of a session; the part of its group differs between runs."""
        shared = np.random.default_rng(1).integers(5, VOCAB, self.shared)
        task = np.random.default_rng([run, session // self.group]).integers(5, VOCAB, self.task)
        return np.concatenate([shared, task]).astype(np.int32)

    def extend(self, ids: Ids, answer: Ids, session: int) -> Ids:
        """Make the next prompt: the previous prompt, the answer and a tool result."""
        tail = np.random.default_rng(session).integers(5, VOCAB, self.tail)
        return np.concatenate([ids, answer, tail]).astype(np.int32)


@dataclass(frozen=True)
class Measured:
    """Result of one run of the load."""

    engine: str
    run: int
    new_tokens_per_s: float
    first_token_median_s: float | None
    """None if the engine does not stream."""
    worst_logprob_error: float
    seconds: float


Generate = Callable[[Ids, int], Awaitable[tuple[Ids, np.ndarray, float | None]]]
"""Prompt and seed to answer ids, log probabilities, and seconds to the first token."""


def model() -> Qwen3ForCausalLM:
    """Make a model of about 1.2 million random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def error(reference: Qwen3ForCausalLM, prompt: Ids, ids: Ids, logprobs: np.ndarray) -> float:
    """Largest difference from the logprobs of a plain forward pass, in nats."""
    whole = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
    logits = reference(whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.float(), -1)
    expected = rows.gather(1, whole[len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(expected - logprobs).max())


async def play(
    name: str, load: Load, run: int, ask: Generate, reference: Qwen3ForCausalLM
) -> Measured:
    """Play all sessions concurrently; check the logprobs of session 0's last answer."""
    waits: list[float] = []

    async def session(index: int) -> tuple[Ids, Ids, np.ndarray]:
        ids = load.prompt(index, run)
        for turn in range(load.turns):
            answer, logprobs, first = await ask(ids, index * load.turns + turn)
            if first is not None:
                waits.append(first)
            if turn < load.turns - 1:
                ids = load.extend(ids, answer, index)
        return ids, answer, logprobs

    began = time.perf_counter()
    last = await asyncio.gather(*(session(index) for index in range(load.sessions)))
    seconds = time.perf_counter() - began
    return Measured(
        engine=name,
        run=run,
        new_tokens_per_s=load.sessions * load.turns * load.answer / seconds,
        first_token_median_s=float(np.median(waits)) if waits else None,
        worst_logprob_error=error(reference, *last[0]),
        seconds=seconds,
    )


async def ours(load: Load, runs: int) -> list[Measured]:
    """Run the load on the embedded engine, streaming."""
    async with Engine(
        model(), eos_ids=[], max_model_len=WINDOW, max_running=load.sessions, threads=1
    ) as engine:

        async def ask(ids: Ids, seed: int) -> tuple[Ids, np.ndarray, float | None]:
            began, first = time.perf_counter(), None
            request = GenerateRequest(prompt_ids=ids, max_tokens=load.answer, seed=seed)
            parts = []
            async with aclosing(engine.generate(request)) as chunks:
                async for chunk in chunks:
                    first = first or time.perf_counter() - began
                    parts.append(chunk)
            ids = np.concatenate([part.ids for part in parts])
            return ids, np.concatenate([part.logprobs for part in parts]), first

        reference = model()
        return [show(await play("tugline", load, run, ask, reference)) for run in range(runs)]


async def theirs(load: Load, runs: int) -> list[Measured]:
    """Run the load on transformers' continuous batching, without block sharing."""
    torch.set_num_threads(1)
    subject = model()
    subject.set_attn_implementation("sdpa")
    longest = load.shared + load.task + load.turns * (load.answer + load.tail)
    page = 64
    settings = ContinuousBatchingConfig(
        return_logprobs=True,
        num_blocks=load.sessions * (longest // page + 2),
        page_size=page,
        max_batch_tokens=1024,
        use_async_batching=False,
        use_cuda_graph=False,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=True, eos_token_id=-1, max_new_tokens=load.answer)
    with subject.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:
        loop = asyncio.get_running_loop()
        count = iter(range(sys.maxsize))

        async def ask(ids: Ids, _: int) -> tuple[Ids, np.ndarray, float | None]:
            name, done = f"r{next(count)}", loop.create_future()
            manager.register_result_handler(
                name, lambda out: loop.call_soon_threadsafe(done.set_result, out)
            )
            manager.add_request(ids.tolist(), request_id=name, max_new_tokens=load.answer)
            out = await asyncio.wait_for(done, WAIT_S)
            if out.error or len(out.generated_tokens) != load.answer:
                msg = f"continuous batching failed: {out.error or len(out.generated_tokens)}"
                raise RuntimeError(msg)
            return np.array(out.generated_tokens, np.int32), np.array(out.logprobs), None

        reference = model()
        return [show(await play("transformers", load, run, ask, reference)) for run in range(runs)]


def show(result: Measured) -> Measured:
    """Print a line of the table, and return the result."""
    first = result.first_token_median_s
    wait = "-" if first is None else f"{first:.3f}"
    speed, difference = result.new_tokens_per_s, result.worst_logprob_error
    print(
        f"{result.engine:<14}{result.run:>4}{speed:>11.0f}{wait:>15}{difference:>11.1e}", flush=True
    )
    return result


def main() -> None:
    """Measure, print the table, and write JSON with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    print(HEAD)
    load = Load(options.sessions, options.turns)
    results = [*asyncio.run(ours(load, options.runs)), *asyncio.run(theirs(load, options.runs))]
    best = {
        name: max(one.new_tokens_per_s for one in results if one.engine == name)
        for name in ("tugline", "transformers")
    }
    ratio = best["tugline"] / best["transformers"]
    print(f"ratio of the best runs: {ratio:.1f}")
    if options.json:
        figures = {"load": asdict(load), "runs": [asdict(one) for one in results], "ratio": ratio}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
