"""Probing experts and kept sets: sound reports, and a stub with one fault at a time."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.test_probe import outcomes
from support.commands import run_command
from tugline.errors import UsageError
from tugline.gateway.probe import CheckOutcome, EngineReport, connect, probe
from tugline.gateway.probe_reports import ModelFacts
from tugline.types import Mode
from tugline.web.serve import serve

VOCAB = 64
EXPERTS = 8
WINDOW = 4096
Fault = Callable[[np.ndarray], np.ndarray]


def keep(rows: np.ndarray) -> np.ndarray:
    """No fault."""
    return rows


@dataclass
class Reporter:
    """A server that looks like vLLM or SGLang and reports experts and kept sets."""

    owner: str = "vllm"
    experts: Fault | None = keep
    """Fault in the experts; None reports none."""
    sets: Callable[[int, list[int]], list[int]] | None = lambda _, kept: kept
    """Fault in the set of a token; None reports none."""
    lists: bool = True
    """Whether likeliest ids are listed."""
    strict: bool = True
    """Whether requests without top_k are refused, as by vLLM that reports sets."""
    flush: int = 200
    """Status of clearing the cache."""
    wavers: float = 0.0
    """Share of experts that differ between computations."""
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def app(self) -> Starlette:
        """Its routes."""
        posts = {
            "/inference/v1/generate": self.vllm,
            "/generate": self.sglang,
            "/reset_prefix_cache": self.clear,
            "/flush_cache": self.clear,
        }
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                *(Route(path, each, methods=["POST"]) for path, each in posts.items()),
            ]
        )

    async def models(self, _: Request) -> Response:
        """One model."""
        card = {"id": "m", "max_model_len": WINDOW, "owned_by": self.owner}
        return JSONResponse({"data": [card]})

    async def clear(self, _: Request) -> Response:
        """Clear nothing."""
        return Response(status_code=self.flush)

    def route(self, prompt: list[int], count: int) -> np.ndarray | None:
        """Experts of a request, which depend on each token alone, shape (n, 3, 2)."""
        if self.experts is None:
            return None
        table = np.random.default_rng(7).permuted(
            np.tile(np.arange(EXPERTS, dtype=np.uint8), (VOCAB, 3, 1)), axis=2
        )
        rows = table[[*prompt, *range(count - 1)], :, :2]
        wavering = self.random.random(rows.shape[:2]) < self.wavers
        rows[wavering] = rows[wavering] ^ 1
        return self.experts(rows)

    def draw(
        self, temperature: float, top_k: int
    ) -> tuple[int, float, list[int], dict[int, float]]:
        """A token, its logprob, its set, and the likeliest ids."""
        logits = self.random.permutation(VOCAB) / 16 / temperature
        order = np.argsort(-logits)
        kept = sorted(order[:top_k].tolist())
        logprobs = logits - np.log(np.exp(logits[kept]).sum())
        token = int(self.random.choice(kept, p=np.exp(logprobs[kept])))
        listed = {int(i): float(logprobs[i]) if i in kept else -9999.0 for i in order[:10]}
        return token, float(logprobs[token]), kept, listed

    async def vllm(self, request: Request) -> Response:
        """VLLM's route."""
        body = await request.json()
        params, prompt = body["sampling_params"], body["token_ids"]
        if self.strict and self.sets is not None and not params["top_k"]:
            return JSONResponse({"error": {"message": "", "code": 500}}, 500)
        if len(prompt) >= WINDOW:
            message = f"This model's maximum context length is {WINDOW} tokens."
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        count = params["max_tokens"]
        drawn = [self.draw(params["temperature"], params["top_k"] or VOCAB) for _ in range(count)]
        listed = [
            [{"token_id": i, "logprob": value} for i, value in each[3].items()] for each in drawn
        ]
        content = [{"token_id": i, "logprob": value} for i, value, _, _ in drawn]
        if params["logprobs"] and self.lists:
            pairs = zip(content, listed, strict=True)
            content = [each | {"top_logprobs": tops} for each, tops in pairs]
        choice: dict[str, Any] = {
            "token_ids": [each[0] for each in drawn],
            "logprobs": {"content": content},
            "finish_reason": "length",
        }
        rows = self.route(prompt, count)
        if rows is not None:
            file = io.BytesIO()
            np.save(file, rows)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        if self.sets is not None:
            choice["sampling_mask"] = [self.sets(each[0], each[2]) for each in drawn]
        return self.reply({"choices": [choice]}, stream=body["stream"])

    async def sglang(self, request: Request) -> Response:
        """SGLang's route."""
        body = await request.json()
        params, prompt = body["sampling_params"], body["input_ids"]
        if len(prompt) >= WINDOW:
            message = f"The input is longer than the model's context length ({WINDOW} tokens)."
            return JSONResponse({"error": {"message": message}}, 400)
        count, top_k = params["max_new_tokens"], params["top_k"]
        drawn = [
            self.draw(params["temperature"], VOCAB if top_k < 0 else top_k) for _ in range(count)
        ]
        meta: dict[str, Any] = {
            "completion_tokens": count,
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[each[1], each[0], None] for each in drawn],
        }
        rows = self.route(prompt, count) if body.get("return_routed_experts") else None
        if rows is not None:
            data = rows.astype(np.int32).tobytes()
            meta["routed_experts"] = base64.b64encode(data).decode()
        if body.get("return_sampling_mask") and self.sets is not None:
            meta["output_token_sampling_mask"] = [self.sets(each[0], each[2]) for each in drawn]
            meta["output_token_sampling_logprobs"] = [each[1] for each in drawn]
        if body.get("top_logprobs_num") and self.lists:
            tops = [[[value, i, None] for i, value in each[3].items()] for each in drawn]
            meta["output_top_logprobs"] = tops
        return self.reply({"meta_info": meta}, stream=body["stream"])

    def reply(self, answer: dict[str, Any], *, stream: bool) -> Response:
        """One event, or the whole."""
        if not stream:
            return JSONResponse(answer)
        event = b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n"
        return StreamingResponse(iter([event]), media_type="text/event-stream")


FACTS = ModelFacts(EXPERTS, 2)


async def examine(facts: ModelFacts | None = FACTS, **faults: Any) -> EngineReport:
    """The doctor's report on a server with these faults."""
    async with serve(Reporter(**faults).app()) as url:
        return await probe(url, facts=facts)


each_owner = pytest.mark.parametrize("owner", ["vllm", "sglang"])


# --------------------------------------------------------------------------- sound reports
@each_owner
@pytest.mark.parametrize("facts", [None, ModelFacts(), FACTS])
async def test_sound_reports_are_measured(owner: str, facts: ModelFacts | None) -> None:
    """The format has the experts' shape and knows of kept sets, also if top-k is required."""
    report = await examine(facts, owner=owner)
    found = outcomes(report)
    assert found["experts"] is found["kept sets"] is CheckOutcome.PASS
    assert (report.experts, report.kept) == ((3, 2), True)
    wire = report.wire()
    assert (wire.mode, wire.experts, wire.kept) == (Mode.EXACT, (3, 2), True)
    thorough = {name: found.get(f"{name}") for name in THOROUGH}
    expected = None if facts is None else CheckOutcome.PASS
    assert set(thorough.values()) == {expected}


THOROUGH = ("experts, computed twice", "kept sets, recomputed")


@each_owner
async def test_an_engine_may_report_neither(owner: str) -> None:
    """A dense model has no experts; advice names the settings for kept sets."""
    report = await examine(ModelFacts(), owner=owner, experts=None, sets=None)
    assert (report.experts, report.kept) == (None, False)
    assert outcomes(report)["kept sets"] is CheckOutcome.UNKNOWN
    assert "experts" not in outcomes(report)
    wire = report.wire()
    assert (wire.experts, wire.kept) == (None, False)
    assert any(advice.startswith("kept sets") for advice in report.advice)


# --------------------------------------------------------------------------- faulty experts
def repeat(rows: np.ndarray) -> np.ndarray:
    """Give the last token the same expert twice."""
    rows = rows.copy()
    rows[-1, 1, 1] = rows[-1, 1, 0]
    return rows


FAULTS: dict[str, tuple[Fault | None, str]] = {
    "zeros": (np.zeros_like, "expert 0 only"),
    "repeats": (repeat, "same expert twice"),
    "short": (lambda rows: rows[:-1], "tokens, must be of"),
    "no rows": (lambda rows: rows[:0], "no experts are reported"),
    "top-k": (
        lambda rows: np.tile(np.arange(4, dtype=np.uint8), (*rows.shape[:2], 1)),
        "a token has 4 in a layer",
    ),
    "out of range": (lambda rows: rows + np.uint8(1), "expert 8 is out of range"),
    "floats": (lambda rows: rows / 2, "must be unsigned integers"),
    "NaN": (lambda rows: np.full(rows.shape, np.nan), "must be unsigned integers"),
    "negative": (lambda rows: rows.astype(np.int32) - 1, "must be unsigned integers"),
    "flat": (lambda rows: rows.reshape(len(rows), -1), "no experts are reported"),
    "missing": (None, "not reported"),
}
FLAT = {
    "zeros": "expert 0 only",
    "short": "values of 1031 tokens",
    "repeats": "same expert twice",
    "out of range": "expert 8 is out of range",
    "negative": "must be unsigned integers",
    "missing": "not reported",
}
"""Faults of experts without a header, and their texts."""


@pytest.mark.parametrize("name", FAULTS)
async def test_wrong_experts_are_refused(name: str) -> None:
    """The refusal says what is wrong, and which settings of vLLM to change."""
    fault, text = FAULTS[name]
    report = await examine(experts=fault)
    assert outcomes(report)["experts"] is CheckOutcome.FAIL
    with pytest.raises(UsageError, match=text) as caught:
        report.wire()
    assert "--enable-return-routed-experts" in str(caught.value)
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in str(caught.value)


@pytest.mark.parametrize("name", FLAT)
async def test_wrong_experts_of_sglang_are_refused(name: str) -> None:
    """Also without a header, whose shape is inferred or computed from the model's top-k."""
    report = await examine(owner="sglang", experts=FAULTS[name][0])
    with pytest.raises(UsageError, match=FLAT[name]) as caught:
        report.wire()
    assert "--enable-return-routed-experts" in str(caught.value)


async def test_a_node_refuses_wrong_experts() -> None:
    """The checks at start, which know nothing of the model, find zeros too."""
    async with serve(Reporter(experts=np.zeros_like).app()) as url:
        with pytest.raises(UsageError, match="expert 0 only"):
            await connect([url])


@each_owner
async def test_experts_that_waver_are_a_warning(owner: str) -> None:
    """More than 5 % that differ between two computations warn, and refuse nothing."""
    report = await examine(owner=owner, wavers=0.2)
    assert outcomes(report)["experts, computed twice"] is CheckOutcome.WARN
    assert report.wire().experts == (3, 2)
    assert outcomes(await examine(owner=owner, wavers=0.01))["experts, computed twice"] is (
        CheckOutcome.PASS
    )


async def test_without_a_cold_cache_nothing_is_known() -> None:
    """If the cache cannot be cleared, equal experts prove nothing."""
    report = await examine(flush=404)
    assert outcomes(report)["experts, computed twice"] is CheckOutcome.UNKNOWN


# --------------------------------------------------------------------------- faulty sets
def other(token: int, kept: list[int]) -> list[int]:
    """Leave out the sampled token."""
    return [i for i in kept if i != token]


def more(_: int, kept: list[int]) -> list[int]:
    """Add an id that was not kept."""
    return [*kept, *[i for i in range(VOCAB) if i not in kept][:1]]


@each_owner
async def test_sets_without_their_token_are_refused(owner: str) -> None:
    """The error names the sampled id."""
    report = await examine(owner=owner, sets=other)
    assert outcomes(report)["kept sets"] is CheckOutcome.FAIL
    with pytest.raises(UsageError, match="without the sampled id"):
        report.wire()


@each_owner
async def test_sets_that_are_not_the_likeliest_ids_are_refused(owner: str) -> None:
    """A set has the ids that top-k leaves; without a list of them nothing is known."""
    report = await examine(owner=owner, sets=more)
    with pytest.raises(UsageError, match="must be the likeliest"):
        report.wire()
    report = await examine(owner=owner, sets=more, lists=False)
    assert outcomes(report)["kept sets, recomputed"] is CheckOutcome.UNKNOWN
    assert report.wire().kept


# --------------------------------------------------------------------------- connecting
async def test_replicas_must_report_the_same() -> None:
    """Replicas of which one reports no experts, or no sets, are refused."""
    for fault in ({"experts": None}, {"sets": None}):
        async with serve(Reporter().app()) as one, serve(Reporter(**fault).app()) as two:
            with pytest.raises(UsageError, match="all replicas must have the same"):
                await connect([one, two])
            upstream = await connect([one])
    assert upstream.wire.experts == (3, 2)
    assert upstream.wire.kept


# --------------------------------------------------------------------------- the command
async def test_the_doctor_reads_the_number_of_experts(tmp_path: Path) -> None:
    """With the model's folder, numbers out of range are refused; without it they cannot be."""
    text = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    async with serve(Reporter(experts=FAULTS["out of range"][0]).app()) as url:
        for arguments, code in ((["--tokenizer", str(tmp_path)], 1), ([], 0)):
            command = ["doctor", "--engine", url, "--json", *arguments]
            done = await asyncio.to_thread(run_command, *command)
            assert done.returncode == code, done.stderr
            refused = json.loads(done.stdout)["refused"]
            assert ("out of range" in (refused or "")) is bool(code)
    with pytest.raises(UsageError, match=r"cannot read .*config\.json"):
        ModelFacts.read(tmp_path / "missing")
