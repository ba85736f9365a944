"""Experts and kept sets that the engine reports, against plain forward passes."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from inference.test_engine import TOLERANCE, make, max_error
from inference.test_sampling import brute_force
from inference.tiny_model import VOCAB, prompt, tiny
from support.models import SMALL, make_kind
from support.polling import until
from tugline.chat.engines.base import EngineRequest
from tugline.chat.model_call import Request
from tugline.chat.tokens import TokenSequence
from tugline.gateway.probe import CheckOutcome, probe
from tugline.gateway.probe_reports import ModelFacts
from tugline.gateway.reply import read_reply
from tugline.inference.base import GenerateRequest, SampledChunk, join
from tugline.inference.engine import Engine
from tugline.inference.routers import read_experts, use_routers
from tugline.inference.server import create_app
from tugline.types import Experts, Ids, Kept, Sampling
from tugline.web.engine_http import EngineHttp
from tugline.web.serve import serve

ALL = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}


def make_moe(seed: int = 0) -> PreTrainedModel:
    """Four layers with eight experts, of which each token uses two."""
    torch.manual_seed(seed)
    changes = {"num_hidden_layers": 4, "vocab_size": VOCAB, "initializer_range": 0.3}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = Qwen3MoeConfig(**SMALL | changes | experts, tie_word_embeddings=False)
    return Qwen3MoeForCausalLM(config).eval()


def make_hybrid(seed: int = 0) -> PreTrainedModel:
    """Gated delta nets beside attention, all with experts."""
    model = make_kind("qwen3_next", seed)
    torch.manual_seed(seed)
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
    return model.eval()


each_kind = pytest.mark.parametrize("build", [make_moe, make_hybrid])


class Plain:
    """Plain forward passes of a copy of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model)
        self._routers = use_routers(self.model)
        for router in self._routers:
            router.keeps_logits = True

    @torch.inference_mode()
    def check_experts(self, ids: Ids, experts: Experts) -> None:
        """Assert that `experts` are those that the routers choose for the first of `ids`."""
        self.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        expected = read_experts(self._routers)
        assert experts.dtype == expected.dtype == np.uint8
        assert experts.shape[1:] == expected.shape[1:]
        for layer, router in enumerate(self._routers):
            logits = router.logits
            assert logits is not None
            rows = logits[: len(experts)]
            chosen, own = (
                rows.gather(1, torch.from_numpy(each[: len(experts), layer].astype(np.int64)))
                for each in (experts, expected)
            )
            # as high as the own choice: equal but for two experts that rounding exchanges
            assert torch.allclose(chosen, own, atol=1e-4)
        differing = (experts != expected[: len(experts)]).any(-1).mean()
        assert differing < 0.01

    @torch.inference_mode()
    def check_kept(self, ids: Ids, output: SampledChunk, knobs: dict[str, float]) -> None:
        """Assert that each token was chosen from the set that a brute force leaves."""
        whole = torch.from_numpy(np.concatenate([ids, output.ids]).astype(np.int64))
        logits = self.model(input_ids=whole[None], use_cache=False).logits[0, len(ids) - 1 : -1]
        assert output.kept is not None
        for row, reported, token, logprob in zip(
            logits.numpy(), output.kept, output.ids, output.logprobs, strict=True
        ):
            expected = brute_force(row, knobs)
            assert reported.tolist() == expected.tolist()
            scores = row.astype(np.float64) / knobs["temperature"]
            assert token in expected
            assert abs(scores[token] - np.log(np.exp(scores[expected]).sum()) - logprob) < TOLERANCE


async def read(engine: Engine, ids: Ids, count: int, **knobs: Any) -> list[SampledChunk]:
    """The chunks of an answer of `count` tokens."""
    request = GenerateRequest(prompt_ids=ids, max_tokens=count, ignore_eos=True, **knobs)
    return [chunk async for chunk in engine.generate(request)]


def check_chunks(ids: Ids, chunks: list[SampledChunk]) -> SampledChunk:
    """Assert that each chunk has the experts of all tokens but its last; return the whole."""
    done = 0
    sampled = 0
    for chunk in chunks:
        sampled += len(chunk.ids)
        assert chunk.experts is not None
        assert chunk.experts_start in {0, done}
        done = chunk.experts_start + len(chunk.experts)
        assert done == len(ids) + sampled - 1
    return join(chunks)


@each_kind
async def test_experts_are_those_of_a_plain_forward_pass(build: Any) -> None:
    """Batches, forks, parked prefixes and row moves change no route, and no log probability."""
    model = build()
    plain = Plain(model)

    async def run_turns(engine: Engine, group: int, seed: int) -> None:
        ids = np.concatenate([prompt(70, seed=99), prompt(5 + group, seed=group)])
        for turn in range(3):
            interval = 1 + seed % 3
            chunks = await read(
                engine, ids, 4 + seed % 7, seed=seed, stream=seed % 5 > 0, stream_interval=interval
            )
            output = check_chunks(ids, chunks)
            assert output.experts is not None
            plain.check_experts(np.concatenate([ids, output.ids[:-1]]), output.experts)
            assert max_error(plain.model, ids, output) < TOLERANCE
            tail = prompt(3 + seed % 5 + turn, seed=seed)
            ids = np.concatenate([ids, output.ids[: 3 + turn * 9], tail])

    async with make(model, max_running=5, max_parked=20) as engine:
        await asyncio.gather(*(run_turns(engine, n % 4, n) for n in range(16)))
        stats = engine.stats()
    assert stats.reused_tokens > stats.prompt_tokens / 10


@each_kind
async def test_new_weights_report_the_whole_context_again(build: Any) -> None:
    """Tokens before an update have the old weights' experts, those after it the new ones'."""
    old, new = build(0), build(7)
    plain = {0: Plain(old), 5: Plain(new)}
    seen: dict[int, list[SampledChunk]] = {seed: [] for seed in range(4)}
    async with make(old, max_running=3) as engine:

        async def consume(seed: int) -> None:
            request = GenerateRequest(
                prompt_ids=prompt(30 + 7 * seed, seed),
                max_tokens=100,
                ignore_eos=True,
                seed=seed,
                stream_interval=1 + 3 * (seed % 2),
            )
            async for chunk in engine.generate(request):
                seen[seed].append(chunk)

        tasks = [asyncio.create_task(consume(seed)) for seed in seen]
        await until(lambda: min(len(seen[seed]) for seed in range(3)) > 5)
        await engine.swap(new.state_dict(), 5, "keep")
        await asyncio.gather(*tasks)
    updated = 0
    for seed, chunks in seen.items():
        ids = prompt(30 + 7 * seed, seed)
        check_chunks(ids, chunks)
        for version, weights in plain.items():
            mine = [chunk for chunk in chunks if chunk.versions[0].version == version]
            if not mine:
                continue
            assert {len(chunk.versions) for chunk in mine} == {1}
            assert mine[0].experts_start == 0
            updated += version == 5
            rows = join(mine).experts
            assert rows is not None
            sampled = join(chunks).ids[: mine[-1].versions[0].end - 1]
            assert len(rows) == len(ids) + len(sampled)
            weights.check_experts(np.concatenate([ids, sampled]), rows)
    assert updated == 4


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "all"])
async def test_kept_sets_are_those_of_a_plain_forward_pass(name: str) -> None:
    """Sets and renormalised log probabilities are right in batches with other rows."""
    model = make_moe()
    plain = Plain(model)
    knobs = ALL if name == "all" else {"temperature": 1.0, name: ALL[name]}
    async with make(model, max_running=4) as engine:
        free, greedy, *answers = await asyncio.gather(
            read(engine, prompt(20), 12),
            read(engine, prompt(20), 12, **{**knobs, "temperature": 0}),
            *(read(engine, prompt(20 + n, n), 12, seed=n, **knobs) for n in range(6)),
        )
    assert {chunk.kept for chunk in (*free, *greedy)} == {None}
    for n, chunks in enumerate(answers):
        assert [len(chunk.kept or ()) for chunk in chunks] == [len(each.ids) for each in chunks]
        plain.check_kept(prompt(20 + n, n), join(chunks), knobs)


async def test_a_dense_model_reports_no_experts() -> None:
    """Answers of a model without routers have none."""
    async with make(tiny()) as engine:
        chunks = await read(engine, prompt(20), 5)
    assert {chunk.experts for chunk in chunks} == {None}


async def test_an_aborted_request_keeps_its_experts() -> None:
    """The last chunk of an aborted answer adds none, and the whole has those before it."""
    model = make_moe()
    async with make(model) as engine:
        task = asyncio.create_task(read(engine, prompt(30), 200, stream=False))
        await until(lambda: engine.stats().sampled_tokens > 3)
        await engine.abort([])
        output = join(await task)
    assert output.experts is not None
    assert len(output.experts) == 30 + len(output.ids) - 1
    Plain(model).check_experts(np.concatenate([prompt(30), output.ids[:-1]]), output.experts)


async def test_a_gateway_measures_and_reads_both() -> None:
    """The probe finds what is reported; answers over HTTP have the engine's arrays."""
    model = make_moe()
    plain = Plain(model)
    ids = prompt(40)
    async with (
        make(model) as engine,
        serve(create_app(engine, model_name="tiny")) as url,
        EngineHttp(url) as http,
    ):
        report = await probe(url, facts=ModelFacts(8, 2))
        wire = report.wire()
        ask = EngineRequest(
            request=Request(model="tiny", messages=()),
            model="tiny",
            sampling=Sampling(**ALL, max_tokens=30),
            request_id="r",
            prompt=TokenSequence(ids),
            experts=True,
            kept=True,
        )
        deltas = [delta async for delta in read_reply(http, url, wire, ask)]
    assert {check.outcome for check in report.checks} <= {CheckOutcome.PASS, CheckOutcome.UNKNOWN}
    assert (wire.experts, wire.kept) == ((4, 2), True)
    sampled = np.array([token for delta in deltas for token in delta.ids], np.int32)
    reports = [delta.experts for delta in deltas if delta.experts is not None]
    rows = np.concatenate([report.rows for report in reports])
    assert len(rows) == len(ids) + len(sampled) - 1
    starts = np.cumsum([0, *(len(report.rows) for report in reports)])
    assert [report.start for report in reports] == starts[:-1].tolist()
    plain.check_experts(np.concatenate([ids, sampled[:-1]]), rows)
    whole = SampledChunk(
        ids=sampled,
        logprobs=np.array([value for delta in deltas for value in delta.logprobs], np.float32),
        versions=(),
        kept=Kept.of(kept for delta in deltas for kept in delta.kept),
    )
    plain.check_kept(ids, whole, ALL)
