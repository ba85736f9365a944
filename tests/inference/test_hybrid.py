"""The engine with models of gated delta nets, and models that it refuses."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from inference.test_engine import TOLERANCE, generate, make, max_error, run_turns
from inference.tiny_model import VOCAB, prompt, truth
from support.models import HYBRID, SMALL, make_kind, make_mistral
from support.polling import until
from tugline.errors import UsageError
from tugline.inference import sampling
from tugline.inference.base import GenerateRequest, SampledChunk, join

TEXT = [name for name in HYBRID if "images" not in name]


def hybrid(kind: str = "qwen3_5", seed: int = 0) -> PreTrainedModel:
    """Return a model with the vocabulary of the engine's tests."""
    model = make_kind(kind, seed)
    torch.manual_seed(seed)
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
    return model.eval()


@pytest.mark.parametrize("kind", TEXT)
async def test_logprobs_are_those_of_a_plain_forward_pass(kind: str) -> None:
    """Reused states, batches and row moves change no log probability (I1)."""
    model, plain = hybrid(kind), hybrid(kind)
    async with make(model, max_running=5, max_parked=20) as engine:
        worst = await asyncio.gather(*(run_turns(engine, plain, n % 4, n) for n in range(16)))
        stats = engine.stats()
    assert max(worst) < TOLERANCE
    assert stats.reused_tokens > stats.prompt_tokens / 3


@pytest.mark.parametrize("length", [1, 2, 3, 64, 150])
async def test_a_shared_prompt_is_computed_once(length: int) -> None:
    """The prompt's state is kept before its last token, whose logits each request needs."""
    model, shared = hybrid(), prompt(length)
    async with make(model) as engine:
        outputs = await asyncio.gather(*(generate(engine, shared, 3, seed=n) for n in range(8)))
        stats = engine.stats()
    assert stats.reused_tokens == (7 * (length - 1) if length > 16 else 0)
    assert max(max_error(model, shared, chunk) for chunk in outputs) < TOLERANCE


async def test_a_next_turn_computes_only_its_tail() -> None:
    """The state at the end of a turn is kept; a prompt that forks earlier is computed anew (I7)."""
    model = hybrid()
    async with make(model) as engine:
        first = await generate(engine, prompt(60), 10, ignore_eos=True)
        before = engine.stats().reused_tokens
        following = np.concatenate([prompt(60), first.ids, prompt(5, seed=3)])
        second = await generate(engine, following, 2)
        after = engine.stats().reused_tokens
        fork = np.concatenate([following[:66], prompt(5, seed=4)])
        third = await generate(engine, fork, 2)
        last = engine.stats().reused_tokens
    assert after - before == 60 + 10 - 1
    assert last - after == 60 - 1, "only the state at the end of the prompt is a beginning of it"
    assert max_error(model, following, second) < TOLERANCE
    assert max_error(model, fork, third) < TOLERANCE


@pytest.mark.parametrize("together", [7, 1000])
async def test_a_score_is_that_of_a_plain_forward_pass(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """A score is exact, whether it is computed in one piece or in several."""
    monkeypatch.setattr(sampling, "SCORED_TOGETHER", together)
    model, ids = hybrid(), prompt(50)
    async with make(model) as engine:
        scored = await engine.score(ids, 1.0)
    assert float(np.abs(truth(model, ids[:1], ids[1:]) - scored).max()) < TOLERANCE


async def test_keep_recomputes_states_with_the_new_weights() -> None:
    """No state of the old weights is continued."""
    model, old, new = hybrid(), hybrid(), hybrid(seed=7)
    seen: list[SampledChunk] = []
    async with make(model) as engine:

        async def consume() -> None:
            request = GenerateRequest(prompt_ids=prompt(40), max_tokens=120, ignore_eos=True)
            async for chunk in engine.generate(request):
                seen.append(chunk)  # noqa: PERF401 - it is read meanwhile

        task = asyncio.create_task(consume())
        await until(lambda: len(seen) > 10)
        await engine.swap(new.state_dict(), 5, "keep")
        await task
        again = await generate(engine, prompt(40), 8)
        reused = engine.stats().reused_tokens
    whole = join(seen)
    end = whole.versions[0].end
    assert [span.version for span in whole.versions] == [0, 5]
    assert max_error(new, prompt(40), again) < TOLERANCE
    assert reused == 0
    before, after = (
        np.abs(truth(weights, prompt(40), whole.ids) - whole.logprobs) for weights in (old, new)
    )
    assert before[:end].max() < TOLERANCE
    assert after[end:].max() < TOLERANCE


def jamba() -> PreTrainedModel:
    """A model with recurrent states of another kind."""
    changes = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    return JambaForCausalLM(
        JambaConfig(**SMALL, **changes, mamba_d_state=4, use_mamba_kernels=False)
    )


def mamba() -> PreTrainedModel:
    """A model without attention."""
    return MambaForCausalLM(MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (make_mistral, "mistral.* uses a cache of DynamicSlidingWindowLayer"),
        (jamba, "jamba.* uses a cache of DynamicLayer, LinearAttentionLayer"),
        (mamba, "mamba.* uses a cache of "),
    ],
)
def test_other_models_are_refused(build: object, text: str) -> None:
    """The error names the model type, the kinds of its layers, and another engine."""
    with pytest.raises(UsageError, match=f"{text}.* serve this model with vLLM"):
        make(build().eval())
