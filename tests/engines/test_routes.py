"""Experts and kept sets of real engines: captured logprobs are recomputed from them.

The model is a mixture of experts with random weights, so its answers are random text. A forward
pass in float32 takes the captured experts, and each token is compared among the captured set that
it was sampled from.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines import hub_models, servers
from engines.conftest import FURTHEST
from support.tasks import make_task
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.app import Gateway
from tugline.gateway.probe import EngineReport, probe
from tugline.gateway.replicas import Upstream
from tugline.inference.routers import use_routers
from tugline.traces.base import PrefixMerging
from tugline.types import Call, Finish, Policy, Sampling, Session, Trace

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
CLOSE = 1e-4
"""Largest difference of a captured logprob from a recomputed one, nats."""
SESSIONS = 3
CALLS = 4
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
TRUNCATED = {
    "plain": PLAIN,
    "top_p": Sampling(temperature=1.0, top_p=0.9, top_k=0, min_p=0.0),
    "top_k": Sampling(temperature=1.0, top_p=1.0, top_k=20, min_p=0.0),
    "min_p": Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.05),
    "temperature": Sampling(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0),
    "together": Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05),
}


@dataclass
class Routed:
    """A running engine, and a model to recompute with."""

    url: str
    source: Path
    model: PreTrainedModel
    report: EngineReport | None = None
    """What `tugline doctor` finds, once it was asked for."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly) for name in ("vllm", "sglang")],
)
def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    """Each engine in turn."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    source = hub_models.make("moe", folder / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32").eval()
    with servers.running(request.param, source, folder, reports=True) as server:
        yield Routed(server.url, source, model)


# --------------------------------------------------------------------------- sessions
@contextlib.asynccontextmanager
async def open_gateway(routed: Routed, folder: Path) -> AsyncIterator[Gateway]:
    """Open a gateway in front of the engine, as `tugline doctor` finds it."""
    routed.report = routed.report or await probe(routed.url)
    upstream = Upstream([routed.url], routed.report.wire())
    rendering = Rendering(Tokenizer.load(routed.source), "qwen3")
    async with Gateway(upstream, rendering, folder) as gateway:
        yield gateway


async def play(
    gateway: Gateway, number: int, sampling: Sampling, options: Sequence[dict[str, Any]]
) -> tuple[Call, ...]:
    """Play a session that is random but for its number; calls take `options` in turn."""
    rng = random.Random(number)
    session = Session(id=f"s{number}", task="t", sample=number)
    policy = Policy.ALLOW if any("top_p" in each for each in options) else Policy.ENFORCE
    task = make_task("t", sampling=sampling, sampling_policy=policy)
    async with (
        gateway.open(session, task) as opened,
        openai.AsyncOpenAI(
            base_url=f"{opened.base_url}/v1", api_key=opened.key, max_retries=0, timeout=300
        ) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": f"Mend wharf {number}."}]
        for turn in range(CALLS):
            chosen = options[turn % len(options)]
            text = await ask(client, messages, rng, chosen)
            if rng.random() < 0.4:  # another answer to the same messages
                continue
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"Find {rng.choice(('pine', 'quay'))}."})
            if rng.random() < 0.25:  # the harness drops its first turn
                del messages[:2]
        return gateway.read_calls(session.id)


async def ask(
    client: openai.AsyncOpenAI, messages: list[Any], rng: random.Random, options: dict[str, Any]
) -> str:
    """Ask for a streamed or a whole answer; return its text."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": rng.randint(4, 16),
        **options,
    }
    if rng.random() < 0.5:
        answer = await client.chat.completions.create(**body)
        return answer.choices[0].message.content or ""
    text = ""
    async with await client.chat.completions.create(**body, stream=True) as stream:
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return text


# --------------------------------------------------------------------------- recomputing
@torch.inference_mode()
def measure(model: PreTrainedModel, trace: Trace) -> float:
    """Return the largest difference of a captured logprob from the recomputed one, nats."""
    assert trace.experts is not None
    ids = torch.from_numpy(trace.ids.astype(np.int64))
    for layer, router in enumerate(use_routers(model)):
        rows = torch.full((len(ids), trace.experts.shape[2]), -1)
        known = torch.from_numpy(trace.experts[:, layer].astype(np.int64))
        rows[: len(known)] = known
        router.replayed = rows
    logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
    furthest = 0.0
    for span in trace.spans:
        for at in range(span.start, span.end):
            if not trace.mask[at]:
                continue
            values = logits[at - 1] / (span.distribution.forward_temperature or 1.0)
            kept = next(iter(trace.kept[at : at + 1])) if trace.kept is not None else ()
            among = values[torch.from_numpy(kept.astype(np.int64))] if len(kept) else values
            right = float(values[ids[at]] - torch.logsumexp(among, -1))
            furthest = max(furthest, abs(right - float(trace.logprobs[at])))
    return furthest


async def check(
    routed: Routed, folder: Path, sampling: Sampling, *options: dict[str, Any]
) -> tuple[float, list[Trace], list[Call]]:
    """Play sessions at once; nothing may be masked; the largest difference, traces and calls.

    Calls of a session take `options` in turn.
    """
    async with open_gateway(routed, folder) as gateway:
        played = [play(gateway, number, sampling, options or ({},)) for number in range(SESSIONS)]
        sessions = await asyncio.gather(*played)
    built = [PrefixMerging().build(calls) for calls in sessions]
    traces = [trace for each in built for trace in each.traces]
    assert [span.masked for trace in traces for span in trace.spans if span.masked] == []
    calls = [call for calls in sessions for call in calls]
    assert sum(trace.trained for trace in traces) == sum(len(call.sampled_ids) for call in calls)
    return max(measure(routed.model, trace) for trace in traces), traces, calls


# --------------------------------------------------------------------------- tests
@pytest.mark.parametrize("name", TRUNCATED)
async def test_logprobs_are_recomputed_from_experts_and_kept_sets(
    routed: Routed, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every sampled token is trained, and its logprob is that of a forward pass with replay."""
    furthest, traces, _ = await check(routed, tmp_path, TRUNCATED[name])
    assert furthest <= CLOSE
    for trace in traces:
        assert trace.experts is not None
        assert trace.experts.shape[1:] == (4, 2)
        if name not in {"plain", "temperature"}:
            assert trace.kept is not None
            assert (trace.kept.sizes[trace.mask] > 0).all()
    record_property(FURTHEST, furthest)


async def test_each_call_has_its_own_distribution(
    routed: Routed, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Calls of one session at top-p 0.5 and at 1 are both exact; only the first have sets."""
    mixed = ({"top_p": 0.5}, {"top_p": 1.0})
    furthest, _, calls = await check(routed, tmp_path, Sampling(temperature=1.0), *mixed)
    assert furthest <= CLOSE
    for call in calls:
        assert call.sampling.top_p in {0.5, 1.0}
        has_sets = call.kept is not None and bool((call.kept.sizes > 0).all())
        assert has_sets is (call.sampling.top_p == 0.5)
    record_property(FURTHEST, furthest)


async def test_answers_that_a_stop_string_ends_keep_their_experts(
    routed: Routed, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The engine reports experts at the end of an answer, which the gateway then still reads."""
    stops = [{"stop": text} for text in ("e", "a", " ")]
    furthest, _, calls = await check(routed, tmp_path, TRUNCATED["together"], *stops)
    assert furthest <= CLOSE
    assert any(call.finish is Finish.STOP for call in calls)
    record_property(FURTHEST, furthest)
