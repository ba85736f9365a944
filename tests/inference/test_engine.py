"""The engine against plain forward passes of the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import math

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from inference.tiny_model import EOS, VOCAB, prompt, tiny, truth
from support.models import make_mistral
from support.polling import until
from tugline.errors import ContextOverflow, EngineError, RequestError, UsageError
from tugline.inference.base import GenerateRequest, SampledChunk, join
from tugline.inference.engine import Engine
from tugline.types import Finish, Ids

TOLERANCE = 1e-4
OTHER_WEIGHTS = 0.5
"""The least error, in nats, of wrong weights or a stale prefix."""


def make(model: Qwen3ForCausalLM, *, max_model_len: int = 256, **options: int) -> Engine:
    """An engine with the tests' end id and window."""
    return Engine(model, eos_ids=[EOS], max_model_len=max_model_len, threads=1, **options)


async def generate(engine: Engine, ids: Ids, max_tokens: int = 12, **knobs: object) -> SampledChunk:
    """Generate from one prompt to the end."""
    request = GenerateRequest(prompt_ids=ids, max_tokens=max_tokens, **knobs)
    async with contextlib.aclosing(engine.generate(request)) as chunks:
        return join([chunk async for chunk in chunks])


def max_error(model: Qwen3ForCausalLM, ids: Ids, output: SampledChunk) -> float:
    """Largest difference in nats between the output and a plain forward pass."""
    return float(np.abs(truth(model, ids, output.ids) - output.logprobs).max())


async def run_turns(engine: Engine, model: Qwen3ForCausalLM, group: int, seed: int) -> float:
    """Three turns that extend each other; the worst error of their log probabilities."""
    ids = np.concatenate([prompt(70, seed=99), prompt(5 + group, seed=group)])
    worst = 0.0
    for turn in range(3):
        output = await generate(engine, ids, 4 + seed % 7, seed=seed, ignore_eos=True)
        worst = max(worst, max_error(model, ids, output))
        ids = np.concatenate([ids, output.ids, prompt(3 + seed % 5 + turn, seed=seed)])
    return worst


async def test_logprobs_are_those_of_a_plain_forward_pass(model: Qwen3ForCausalLM) -> None:
    """Prefix reuse, padding, batching and row moves change no log probability (I1)."""
    async with make(model, max_running=5, max_parked=7) as engine:
        worst = await asyncio.gather(*(run_turns(engine, model, n % 4, n) for n in range(16)))
        stats = engine.stats()
    assert max(worst) < TOLERANCE
    assert stats.reused_tokens > stats.prompt_tokens / 2
    assert stats.running == stats.waiting == 0


async def test_a_shared_prompt_is_computed_once(model: Qwen3ForCausalLM) -> None:
    """Requests with a common prompt wait for the first one's KV instead of repeating it."""
    shared = prompt(150)
    async with make(model) as engine:
        outputs = await asyncio.gather(*(generate(engine, shared, 3, seed=n) for n in range(8)))
        stats = engine.stats()
    assert stats.reused_tokens == 7 * (len(shared) - 1)
    assert max(max_error(model, shared, chunk) for chunk in outputs) < TOLERANCE


async def test_a_next_turn_computes_only_its_tail(model: Qwen3ForCausalLM) -> None:
    """Everything but the last sampled id and the tail is reused (I7)."""
    async with make(model) as engine:
        first = await generate(engine, prompt(60), 10, ignore_eos=True)
        before = engine.stats()
        following = np.concatenate([prompt(60), first.ids, prompt(5, seed=3)])
        await generate(engine, following, 2)
        after = engine.stats()
    assert after.reused_tokens - before.reused_tokens == 60 + 10 - 1
    assert after.parked == 1, "the shorter turn was superseded"


async def test_the_least_recently_used_sequence_is_evicted(model: Qwen3ForCausalLM) -> None:
    """At most `max_parked` sequences are kept, the last used ones."""
    async with make(model, max_parked=2) as engine:
        for seed in (1, 2):
            await generate(engine, prompt(40, seed=seed), 2)
        await generate(engine, np.append(prompt(40, seed=1)[:30], prompt(10, seed=8)), 2)
        stats = engine.stats()
        await generate(engine, prompt(40, seed=2), 2)
        assert engine.stats().reused_tokens == stats.reused_tokens, "seed 2 was evicted"
        assert stats.parked == 2
        assert stats.reused_tokens == 30


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_a_swap_leaves_no_stale_prefix(model: Qwen3ForCausalLM, mode: str) -> None:
    """After a swap the same prompt is computed again, without the KV of the old weights."""
    ids = prompt(80)
    async with make(model) as engine:
        old = await generate(engine, ids, 8, seed=1, ignore_eos=True)
        await engine.swap(tiny(7).state_dict(), 1, mode)
        new = await generate(engine, ids, 8, seed=1, ignore_eos=True)
        reused = engine.stats().reused_tokens
    assert max_error(tiny(0), ids, old) < TOLERANCE
    assert max_error(tiny(7), ids, new) < TOLERANCE
    assert max_error(tiny(0), ids, new) > OTHER_WEIGHTS, "the weights differ enough"
    assert reused == 0
    assert (old.versions[0].version, new.versions[0].version) == (0, 1)


async def test_keep_recomputes_contexts_with_the_new_weights(model: Qwen3ForCausalLM) -> None:
    """Tokens before a swap have the old weights' log probabilities, later ones the new ones'."""
    async with make(model, max_running=3) as engine:
        seen: dict[int, list[SampledChunk]] = {seed: [] for seed in range(4)}

        async def consume(seed: int) -> None:
            request = GenerateRequest(
                prompt_ids=prompt(30 + 7 * seed, seed), max_tokens=120, ignore_eos=True, seed=seed
            )
            async for chunk in engine.generate(request):
                seen[seed].append(chunk)

        tasks = [asyncio.create_task(consume(seed)) for seed in seen]
        await until(lambda: min(len(seen[seed]) for seed in range(3)) > 10)
        await engine.swap(tiny(7).state_dict(), 5, "keep")
        await asyncio.gather(*tasks)
        reused = engine.stats().reused_tokens
    for seed in range(3):
        ids, whole = prompt(30 + 7 * seed, seed), join(seen[seed])
        first, second = whole.versions
        assert (first.version, second.version, second.end) == (0, 5, 120)
        old, new = (
            np.abs(truth(weights, ids, whole.ids) - whole.logprobs) for weights in map(tiny, (0, 7))
        )
        assert old[: first.end].max() < TOLERANCE
        assert new[first.end :].max() < TOLERANCE
        assert new[: first.end].max() > OTHER_WEIGHTS, "the weights differ enough"
    assert [span.version for span in join(seen[3]).versions] == [5]
    assert reused == 0


async def test_wait_drains_running_requests_before_the_swap(model: Qwen3ForCausalLM) -> None:
    """Running requests end under the old weights, queued ones start under the new."""
    async with make(model, max_running=2) as engine:
        running = [
            asyncio.create_task(generate(engine, prompt(40, seed), 40, ignore_eos=True))
            for seed in range(4)
        ]
        await until(lambda: engine.stats().running == 2)
        await engine.swap(tiny(7).state_dict(), 1, "wait")
        outputs = await asyncio.gather(*running)
    assert [[span.version for span in chunk.versions] for chunk in outputs] == [[0], [0], [1], [1]]


async def test_abort_returns_partial_output(model: Qwen3ForCausalLM) -> None:
    """A swap with abort ends requests with the ids and log probabilities so far."""
    async with make(model) as engine:
        task = asyncio.create_task(generate(engine, prompt(40), 200, ignore_eos=True))
        await until(lambda: engine.stats().sampled_tokens > 3)
        await engine.swap(tiny(7).state_dict(), 1, "abort")
        output = await task
    assert output.finish == Finish.ABORT
    assert 0 < len(output.ids) < 200
    assert max_error(tiny(0), prompt(40), output) < TOLERANCE


async def test_wrong_weights_are_refused(model: Qwen3ForCausalLM) -> None:
    """The error names the missing or misshaped tensor, and the old weights stay."""
    ids = prompt(40)
    async with make(model) as engine:
        weights = tiny(7).state_dict()
        name = "model.layers.1.mlp.up_proj.weight"
        with pytest.raises(UsageError, match=r"up_proj.*\(3, 3\)"):
            await engine.swap(weights | {name: torch.zeros(3, 3)}, 1)
        del weights[name]
        with pytest.raises(UsageError, match=r"up_proj.*missing"):
            await engine.swap(weights, 1)
        output = await generate(engine, ids)
        assert engine.version == 0
    assert max_error(tiny(0), ids, output) < TOLERANCE


async def test_a_seed_fixes_the_output_in_any_batch(model: Qwen3ForCausalLM) -> None:
    """A seeded request samples the same ids alone, among others, and after prefix reuse."""
    ids = prompt(60)
    async with make(model, max_running=6) as engine:
        alone = await generate(engine, ids, 20, seed=42, ignore_eos=True, temperature=0.9)
        batch = [generate(engine, prompt(20 + 9 * seed, seed), 5 + seed) for seed in range(10)]
        batch.insert(4, generate(engine, ids, 20, seed=42, ignore_eos=True, temperature=0.9))
        beside = (await asyncio.gather(*batch))[4]
        other = await generate(engine, ids, 20, seed=43, ignore_eos=True, temperature=0.9)
    assert alone.ids.tolist() == beside.ids.tolist()
    assert alone.ids.tolist() != other.ids.tolist()


async def test_generation_ends_at_the_window(model: Qwen3ForCausalLM) -> None:
    """The last position of the window can be sampled, and nothing after it."""
    async with make(model, max_model_len=64) as engine:
        output = await generate(engine, prompt(60), 60, ignore_eos=True)
        edge = await generate(engine, prompt(63), 1, ignore_eos=True)
        with pytest.raises(ContextOverflow, match=r"64 tokens.*64 input tokens"):
            await generate(engine, prompt(64), 1)
    assert (len(output.ids), output.finish) == (4, Finish.LENGTH)
    assert len(edge.ids) == 1
    assert max_error(model, prompt(60), output) < TOLERANCE


async def test_a_dead_engine_fails_requests_with_its_error(model: Qwen3ForCausalLM) -> None:
    """An error in the forward pass fails waiting and later requests, and swaps."""
    async with make(model) as engine:
        await generate(engine, prompt(20), 1)
        model.lm_head.weight.data = torch.zeros(VOCAB, 5)
        with pytest.raises(EngineError, match="the engine has failed: RuntimeError"):
            await asyncio.wait_for(generate(engine, prompt(30)), 20)
        assert engine.down
        with pytest.raises(EngineError, match="the engine has failed"):
            await generate(engine, prompt(30))
    with pytest.raises(EngineError):
        await engine.swap(tiny(1).state_dict(), 1)


@pytest.mark.parametrize(("name", "value"), [("temperature", math.nan), ("top_k", -5)])
async def test_values_that_json_cannot_have_are_refused(
    model: Qwen3ForCausalLM, name: str, value: float
) -> None:
    """The error has name and value, and comes before anything is sampled."""
    async with make(model) as engine:
        with pytest.raises(RequestError, match=f"{name}={value}"):
            await generate(engine, prompt(5), **{name: value})


def test_sliding_window_models_are_refused() -> None:
    """The error names the model type and another engine."""
    with pytest.raises(UsageError, match=r"mistral.*vLLM"):
        make(make_mistral())
