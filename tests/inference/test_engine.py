"""The engine against plain forward passes of the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import math

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from inference.tiny_model import EOS, VOCAB, prompt, tiny, truth, until
from random_models import mistral
from tugline.errors import ContextOverflow, EngineError, RequestError, UsageError
from tugline.inference.base import GenerateRequest, SampledChunk, join
from tugline.inference.engine import Engine
from tugline.types import Finish, Ids

TOLERANCE = 1e-4
OTHER_WEIGHTS = 0.5
"""Nats by which the wrong weights or a stale prefix are off, at least."""


def make(model: Qwen3ForCausalLM, *, max_model_len: int = 256, **options: int) -> Engine:
    """An engine with the tests' end id and window."""
    return Engine(model, eos_ids=[EOS], max_model_len=max_model_len, threads=1, **options)


async def answer(engine: Engine, ids: Ids, max_tokens: int = 12, **knobs: object) -> SampledChunk:
    """The whole answer to one prompt."""
    request = GenerateRequest(prompt_ids=ids, max_tokens=max_tokens, **knobs)
    async with contextlib.aclosing(engine.generate(request)) as chunks:
        return join([chunk async for chunk in chunks])


def off(model: Qwen3ForCausalLM, ids: Ids, said: SampledChunk, temperature: float = 1.0) -> float:
    """Largest difference in nats between what was said and a plain forward pass."""
    return float(np.abs(truth(model, ids, said.ids, temperature) - said.logprobs).max())


async def talk(engine: Engine, model: Qwen3ForCausalLM, group: int, one: int) -> float:
    """Three turns that extend each other; the worst error of their log probabilities."""
    ids = np.concatenate([prompt(70, seed=99), prompt(5 + group, seed=group)])
    worst = 0.0
    for turn in range(3):
        said = await answer(engine, ids, 4 + one % 7, seed=one, ignore_eos=True)
        worst = max(worst, off(model, ids, said))
        ids = np.concatenate([ids, said.ids, prompt(3 + one % 5 + turn, seed=one)])
    return worst


async def test_logprobs_are_those_of_a_plain_forward_pass(model: Qwen3ForCausalLM) -> None:
    """Prefix reuse, padding, batching and row moves change no log probability (I1)."""
    async with make(model, max_running=5, max_parked=7) as engine:
        worst = await asyncio.gather(*(talk(engine, model, one % 4, one) for one in range(16)))
        stats = engine.stats()
    assert max(worst) < TOLERANCE
    assert stats.reused_tokens > stats.prompt_tokens / 2
    assert stats.running == stats.waiting == 0


async def test_a_group_that_arrives_together_computes_its_prompt_once(
    model: Qwen3ForCausalLM,
) -> None:
    """Requests with a common prompt wait for the first one's KV instead of repeating it."""
    shared = prompt(150)
    async with make(model) as engine:
        said = await asyncio.gather(*(answer(engine, shared, 3, seed=one) for one in range(8)))
        stats = engine.stats()
    assert stats.reused_tokens == 7 * (len(shared) - 1)
    assert max(off(model, shared, one) for one in said) < TOLERANCE


async def test_a_next_turn_computes_only_its_tail(model: Qwen3ForCausalLM) -> None:
    """Of prompt + sampled ids + tail, all but the last sampled id and the tail is reused (I7)."""
    async with make(model) as engine:
        first = await answer(engine, prompt(60), 10, ignore_eos=True)
        before = engine.stats()
        following = np.concatenate([prompt(60), first.ids, prompt(5, seed=3)])
        await answer(engine, following, 2)
        after = engine.stats()
    assert after.reused_tokens - before.reused_tokens == 60 + 10 - 1
    assert after.parked == 1, "the shorter turn was superseded"


async def test_the_least_recently_used_sequence_makes_room(model: Qwen3ForCausalLM) -> None:
    """Parking is bounded, and what was used last stays."""
    async with make(model, max_parked=2) as engine:
        for seed in (1, 2):
            await answer(engine, prompt(40, seed=seed), 2)
        await answer(engine, np.append(prompt(40, seed=1)[:30], prompt(10, seed=8)), 2)
        stats = engine.stats()
        await answer(engine, prompt(40, seed=2), 2)
        assert engine.stats().reused_tokens == stats.reused_tokens, "seed 2 was evicted"
        assert stats.parked == 2
        assert stats.reused_tokens == 30


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_a_swap_leaves_no_stale_prefix(model: Qwen3ForCausalLM, mode: str) -> None:
    """After a swap the same prompt is computed afresh: old KV would be off by far."""
    ids = prompt(80)
    async with make(model) as engine:
        old = await answer(engine, ids, 8, seed=1, ignore_eos=True)
        await engine.swap(tiny(7).state_dict(), 1, mode)
        new = await answer(engine, ids, 8, seed=1, ignore_eos=True)
        reused = engine.stats().reused_tokens
    assert off(tiny(0), ids, old) < TOLERANCE
    assert off(tiny(7), ids, new) < TOLERANCE
    assert off(tiny(0), ids, new) > OTHER_WEIGHTS, "the test can tell the weights apart"
    assert reused == 0
    assert (old.versions[0].version, new.versions[0].version) == (0, 1)


async def test_keep_continues_over_a_context_of_the_new_weights(model: Qwen3ForCausalLM) -> None:
    """Tokens before a swap are exactly those of the old weights, tokens after it of the new."""
    async with make(model, max_running=3) as engine:
        seen: dict[int, list[SampledChunk]] = {one: [] for one in range(4)}

        async def consume(one: int) -> None:
            request = GenerateRequest(
                prompt_ids=prompt(30 + 7 * one, one), max_tokens=120, ignore_eos=True, seed=one
            )
            async for chunk in engine.generate(request):
                seen[one].append(chunk)

        tasks = [asyncio.create_task(consume(one)) for one in seen]
        await until(lambda: min(len(seen[one]) for one in range(3)) > 10)
        await engine.swap(tiny(7).state_dict(), 5, "keep")
        await asyncio.gather(*tasks)
        reused = engine.stats().reused_tokens
    for one in range(3):
        ids, whole = prompt(30 + 7 * one, one), join(seen[one])
        first, second = whole.versions
        assert (first.version, second.version, second.end) == (0, 5, 120)
        old, new = (
            np.abs(truth(weights, ids, whole.ids) - whole.logprobs) for weights in map(tiny, (0, 7))
        )
        assert old[: first.end].max() < TOLERANCE
        assert new[first.end :].max() < TOLERANCE
        assert new[: first.end].max() > OTHER_WEIGHTS, "the test can tell the weights apart"
    assert [span.version for span in join(seen[3]).versions] == [5]
    assert reused == 0


async def test_wait_drains_before_the_swap_and_holds_what_is_new(model: Qwen3ForCausalLM) -> None:
    """Running answers end under the old weights, queued ones start under the new."""
    async with make(model, max_running=2) as engine:
        running = [
            asyncio.create_task(answer(engine, prompt(40, one), 40, ignore_eos=True))
            for one in range(4)
        ]
        await until(lambda: engine.stats().running == 2)
        await engine.swap(tiny(7).state_dict(), 1, "wait")
        said = await asyncio.gather(*running)
    assert [[span.version for span in one.versions] for one in said] == [[0], [0], [1], [1]]


async def test_abort_ends_running_answers_with_what_they_have(model: Qwen3ForCausalLM) -> None:
    """A swap with abort returns partial answers with their ids and log probabilities."""
    async with make(model) as engine:
        task = asyncio.create_task(answer(engine, prompt(40), 200, ignore_eos=True))
        await until(lambda: engine.stats().sampled_tokens > 3)
        await engine.swap(tiny(7).state_dict(), 1, "abort")
        said = await task
    assert said.finish == Finish.ABORT
    assert 0 < len(said.ids) < 200
    assert off(tiny(0), prompt(40), said) < TOLERANCE


async def test_wrong_weights_are_refused_and_the_old_ones_stay(model: Qwen3ForCausalLM) -> None:
    """A swap with a missing name or a wrong shape names it and changes nothing."""
    ids = prompt(40)
    async with make(model) as engine:
        weights = tiny(7).state_dict()
        name = "model.layers.1.mlp.up_proj.weight"
        with pytest.raises(UsageError, match=r"up_proj.*\(3, 3\)"):
            await engine.swap(weights | {name: torch.zeros(3, 3)}, 1)
        del weights[name]
        with pytest.raises(UsageError, match=r"up_proj.*missing"):
            await engine.swap(weights, 1)
        said = await answer(engine, ids)
        assert engine.version == 0
    assert off(tiny(0), ids, said) < TOLERANCE


async def test_a_seed_fixes_the_answer_whatever_runs_beside_it(model: Qwen3ForCausalLM) -> None:
    """A seeded request samples the same ids alone, in a crowd, and after reuse of its prefix."""
    ids = prompt(60)
    async with make(model, max_running=6) as engine:
        alone = await answer(engine, ids, 20, seed=42, ignore_eos=True, temperature=0.9)
        crowd = [answer(engine, prompt(20 + 9 * one, one), 5 + one) for one in range(10)]
        crowd.insert(4, answer(engine, ids, 20, seed=42, ignore_eos=True, temperature=0.9))
        beside = (await asyncio.gather(*crowd))[4]
        other = await answer(engine, ids, 20, seed=43, ignore_eos=True, temperature=0.9)
    assert alone.ids.tolist() == beside.ids.tolist()
    assert alone.ids.tolist() != other.ids.tolist()


async def test_an_answer_ends_at_the_window(model: Qwen3ForCausalLM) -> None:
    """The last position of the window can be sampled, and nothing after it."""
    async with make(model, max_model_len=64) as engine:
        said = await answer(engine, prompt(60), 60, ignore_eos=True)
        edge = await answer(engine, prompt(63), 1, ignore_eos=True)
        with pytest.raises(ContextOverflow, match=r"64 tokens.*64 input tokens"):
            await answer(engine, prompt(64), 1)
    assert (len(said.ids), said.finish) == (4, Finish.LENGTH)
    assert len(edge.ids) == 1
    assert off(model, prompt(60), said) < TOLERANCE


async def test_a_dead_engine_fails_every_request_with_its_reason(model: Qwen3ForCausalLM) -> None:
    """A fault in the forward pass reaches whoever waits, and whoever comes later."""
    async with make(model) as engine:
        await answer(engine, prompt(20), 1)
        model.lm_head.weight.data = torch.zeros(VOCAB, 5)
        with pytest.raises(EngineError, match="the engine is down: RuntimeError"):
            await asyncio.wait_for(answer(engine, prompt(30)), 20)
        assert engine.down
        with pytest.raises(EngineError, match="down"):
            await answer(engine, prompt(30))
    with pytest.raises(EngineError):
        await engine.swap(tiny(1).state_dict(), 1)


@pytest.mark.parametrize(("name", "value"), [("temperature", math.nan), ("top_k", -5)])
async def test_what_http_cannot_say_is_refused_as_well(
    model: Qwen3ForCausalLM, name: str, value: float
) -> None:
    """By name and value, before anything is sampled."""
    async with make(model) as engine:
        with pytest.raises(RequestError, match=f"{name}={value}"):
            await answer(engine, prompt(5), **{name: value})


def test_models_that_the_pool_cannot_hold_are_refused() -> None:
    """Sliding-window layers would be served wrongly, so they are not served."""
    with pytest.raises(UsageError, match=r"mistral.*vLLM"):
        make(mistral())
