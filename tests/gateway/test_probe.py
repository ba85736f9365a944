"""Probing sound engines, and a stub with one fault at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from support.commands import run_command
from support.engine import RENDERING, reply_with
from tugline.chat.templates.rendering import find_template
from tugline.errors import EngineError, UsageError
from tugline.gateway.app import Gateway
from tugline.gateway.probe import CheckOutcome, EngineReport, connect, probe
from tugline.inference.server import create_app
from tugline.testing import ScriptedEngine
from tugline.types import LogprobMeaning, Mode
from tugline.web.serve import serve

WINDOW = 512
_ADAPTER = {"id": "adapter", "max_model_len": None, "parent": "m"}
LOGITS = np.array([2.0, 1.0, 0.0])


@dataclass
class Stub:
    """A server that looks like vLLM, with a model of three tokens; each field is a fault."""

    scale_out: bool = True
    ids: bool = True
    tools: bool = True
    raw: bool = True
    refuses: bool = True
    """Whether a prompt that is too long is an error."""
    owner: str = "vllm"
    lists: bool = True
    load: bool = True
    """Whether the load is reported."""
    status: int = 200
    """Of the list of models."""

    def app(self) -> Starlette:
        """Its routes."""
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        """One model, and an adapter for it, as vLLM lists them."""
        card = {"id": "m", "max_model_len": WINDOW, "owned_by": self.owner, "parent": None}
        cards = [card, _ADAPTER | {"owned_by": self.owner}]
        return JSONResponse({"data": cards if self.lists else []}, self.status)

    async def version(self, _: Request) -> Response:
        """Some version."""
        return JSONResponse({"version": "9.9"})

    async def metrics(self, _: Request) -> Response:
        """The metrics of a vLLM that is idle."""
        return PlainTextResponse("vllm:num_requests_waiting 0.0\n" if self.load else "")

    async def generate(self, request: Request) -> Response:
        """Ids in, ids out."""
        body = await request.json()
        if not self.scale_out:
            return JSONResponse({"detail": "Not Found"}, 404)
        if refusal := self._refusal(len(body["token_ids"])):
            return refusal
        params = body["sampling_params"]

        def choice(token: int, logprob: float, *, last: bool) -> dict[str, Any]:
            return {
                "token_ids": [token],
                "logprobs": {"content": [{"logprob": logprob}]},
                "finish_reason": "length" if last else None,
            }

        return await self._answer(body, params["temperature"], params["max_tokens"], choice)

    async def chat(self, request: Request) -> Response:
        """Messages in."""
        body = await request.json()
        if body.get("tools") and not self.tools:
            return JSONResponse({"error": {"message": "no tool parser", "code": 400}}, 400)
        if refusal := self._refusal(len(body["messages"][0]["content"].split())):
            return refusal
        part = "delta" if body["stream"] else "message"

        def make_choice(token: int, logprob: float, *, last: bool) -> dict[str, Any]:
            choice: dict[str, Any] = {part: {"content": "abc"[token]}}
            if self.ids:
                choice |= {"token_ids": [token], "prompt_token_ids": [10, 11]}
                choice |= {"logprobs": {"content": [{"logprob": logprob}]}}
            return choice | {"finish_reason": "length" if last else None}

        return await self._answer(body, body["temperature"], body["max_tokens"], make_choice)

    def _refusal(self, length: int) -> Response | None:
        if length < WINDOW or not self.refuses:
            return None
        message = f"This model's maximum context length is {WINDOW} tokens, not {length}."
        return JSONResponse({"error": {"message": message, "code": 400}}, 400)

    async def _answer(
        self, body: dict[str, Any], temperature: float, count: int, choice: Callable[..., Any]
    ) -> Response:
        def draw(index: int) -> dict[str, Any]:
            cool = _log_softmax(LOGITS / temperature)
            token = int(np.random.default_rng().choice(3, p=np.exp(cool)))
            logprob = float((_log_softmax(LOGITS) if self.raw else cool)[token])
            made: dict[str, Any] = choice(token, logprob, last=index == count - 1)
            return made

        async def events() -> AsyncIterator[bytes]:
            for index in range(count):
                yield b"data: " + json.dumps({"choices": [draw(index)]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        if body["stream"]:
            return StreamingResponse(events(), media_type="text/event-stream")
        drawn = [draw(index) for index in range(count)]
        whole = drawn[-1]
        if "token_ids" in whole:
            whole["token_ids"] = [token for each in drawn for token in each["token_ids"]]
            content = [entry for each in drawn for entry in each["logprobs"]["content"]]
            whole["logprobs"] = {"content": content}
        return JSONResponse({"choices": [whole]})


def _log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum())


async def examine(**faults: Any) -> EngineReport:
    """The report on a stub with these faults."""
    async with serve(Stub(**faults).app()) as url:
        return await probe(url)


def outcomes(report: EngineReport) -> dict[str, CheckOutcome]:
    """Checks by name."""
    return {check.name: check.outcome for check in report.checks}


def engine(window: int = 4096) -> ScriptedEngine:
    """An engine that answers anything."""
    play = reply_with("word " * 60, delay_s=0.002)
    return ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size, max_model_len=window)


# --------------------------------------------------------------------------- sound engines
async def test_the_scripted_engine_is_sound() -> None:
    """Exact mode works and overflow is reported; logprobs of certain tokens mean nothing."""
    async with serve(create_app(engine(2048), model_name="scripted")) as url:
        report = await probe(f"{url}/v1", "scripted")
    assert (report.engine, report.model, report.window) == ("embedded", "scripted", 2048)
    assert list(report.routes.items()) == [("generate", Mode.EXACT)]
    assert report.advice == ()
    found = outcomes(report)
    assert found.pop("logprobs") is CheckOutcome.UNKNOWN
    assert set(found.values()) == {CheckOutcome.PASS}
    assert report.wire().mode is Mode.EXACT
    with pytest.raises(UsageError, match="does not support text mode"):
        report.wire(Mode.TEXT)


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "processed"])
async def test_the_meaning_of_logprobs_is_measured(*, raw: bool) -> None:
    """Samples alone show the meaning, in exact and in observed mode."""
    right = LogprobMeaning.RAW if raw else LogprobMeaning.PROCESSED
    for scale_out in (True, False):
        report = await examine(raw=raw, scale_out=scale_out)
        assert report.logprob_meaning is right
        assert report.wire().logprob_meaning is right
        assert any("processed_logprobs" in advice for advice in report.advice) is raw


# --------------------------------------------------------------------------- faulty engines
async def test_an_engine_that_drops_ids_is_refused() -> None:
    """The refusal names the flags to add, and only text mode is left."""
    report = await examine(ids=False, scale_out=False)
    assert report.mode is Mode.TEXT
    assert not report.sound
    with pytest.raises(UsageError, match="--enable-scale-out"):
        report.wire()
    assert report.wire(Mode.TEXT).mode is Mode.TEXT
    assert outcomes(report)["chat: stream"] is CheckOutcome.FAIL


async def test_without_a_tool_parser_observed_mode_is_not_sound() -> None:
    """The advice names the missing option; exact mode, which needs no parser, is sound."""
    report = await examine(tools=False)
    assert Mode.OBSERVED not in report.routes.values()
    assert any("--tool-call-parser" in advice for advice in report.advice)
    assert report.mode is Mode.EXACT


async def test_a_load_that_is_not_reported_is_a_weakness() -> None:
    """The engine is sound, and the advice names the setting."""
    report = await examine(load=False)
    assert report.sound
    assert outcomes(report)["load"] is CheckOutcome.WARN
    assert any("load: start vLLM without" in advice for advice in report.advice)
    assert outcomes(await examine())["load"] is CheckOutcome.PASS


async def test_an_unreported_context_overflow_fails_its_check() -> None:
    """A prompt that is too long must be an error, on which agents compact their history."""
    assert outcomes(await examine(refuses=False))["context overflow"] is CheckOutcome.FAIL
    assert outcomes(await examine())["context overflow"] is CheckOutcome.PASS


async def test_an_unknown_server_is_probed_as_openai() -> None:
    """An unknown server has observed mode if it reports ids, else text mode."""
    report = await examine(owner="somebody")
    assert (report.engine, report.mode) == ("openai", Mode.OBSERVED)
    report = await examine(owner="somebody", ids=False)
    assert (report.engine, report.mode) == ("openai", Mode.TEXT)


async def test_a_missing_engine_or_model_is_one_clear_error() -> None:
    """The error names what is missing: the engine, the address or the model."""
    for ask in (probe("http://127.0.0.1:9"), connect(["http://127.0.0.1:9"])):
        with pytest.raises(EngineError, match=r"cannot reach the engine at .*127\.0\.0\.1:9"):
            await ask
    with pytest.raises(UsageError, match="give at least one"):
        await connect([])
    async with serve(Stub().app()) as url:
        with pytest.raises(UsageError, match="does not serve model 'x'; it serves m, adapter"):
            await probe(url, "x")


async def test_an_engine_without_a_model_list_needs_a_name() -> None:
    """An error asks for a name; with one, the engine is probed."""
    async with serve(Stub(owner="", lists=False).app()) as url:
        with pytest.raises(UsageError, match=r"list of models at .* is empty: name the model"):
            await probe(url)
        assert (await probe(url, "mine")).model == "mine"


@pytest.mark.parametrize(("status", "expected"), [(500, 500), (403, 403), (404, 404), (503, None)])
async def test_errors_of_the_model_list_have_its_status(status: int, expected: int | None) -> None:
    """The error has the status, or none for 503, which may pass; a given name replaces a 404."""
    async with serve(Stub(owner="", status=status).app()) as url:
        with pytest.raises(EngineError, match=f"/v1/models answers with status {status}") as caught:
            await probe(url)
        assert caught.value.status == expected
        if status == 404:
            assert (await probe(url, "mine")).model == "mine"


async def test_an_adapter_has_the_window_of_its_model() -> None:
    """An adapter, for which engines list no window, has that of its base model."""
    async with serve(Stub().app()) as url:
        report = await probe(url, "adapter")
    assert (report.model, report.window, report.mode) == ("adapter", WINDOW, Mode.EXACT)


# --------------------------------------------------------------------------- connecting
async def test_a_sound_engine_is_connected_in_its_best_mode(tmp_path: Path) -> None:
    """The gateway uses the format that the probe chose; an unsound mode is refused."""
    app = create_app(engine(), model_name="scripted")
    async with serve(app) as one, serve(create_app(engine(), model_name="scripted")) as other:
        upstream = await connect([one, other])
        assert upstream.wire.mode is Mode.EXACT
        async with Gateway(upstream, RENDERING, tmp_path) as gateway:
            assert gateway.card.id == "scripted"
        with pytest.raises(UsageError, match="does not support observed mode"):
            await connect([one], mode=Mode.OBSERVED)


async def test_replicas_that_differ_are_refused() -> None:
    """Replicas with different windows are an error, since a conversation may move between them."""
    apps = [create_app(engine(window), model_name="scripted") for window in (4096, 2048)]
    async with serve(apps[0]) as one, serve(apps[1]) as other:
        with pytest.raises(UsageError, match=r"same window, but it is 4096 at .* and 2048 at "):
            await connect([one, other])


# --------------------------------------------------------------------------- the command
async def run(*arguments: str) -> tuple[int, str]:
    """``tugline doctor``: exit code and output."""
    done = await asyncio.to_thread(run_command, "doctor", *arguments)
    return done.returncode, done.stdout + done.stderr


async def test_the_doctor_command_prints_text_or_json() -> None:
    """The command exits with 1 where the requested mode is not sound."""
    async with serve(Stub(ids=False, scale_out=False).app()) as url:
        code, text = await run("--engine", url)
        assert code == 1
        assert "refused" in text
        assert "--enable-scale-out" in text
        code, text = await run("--engine", url, "--mode", "text", "--json")
        report = json.loads(text)
        assert (code, report["mode"], report["sound"]) == (0, "text", False)
        assert report["refused"] is None
    async with serve(Stub().app()) as url:
        code, text = await run("--engine", url, "--json")
        assert (code, json.loads(text)["mode"]) == (0, "exact")
        start = f"tugline up --engine {url}"
        exact = f"{start} --tokenizer MODEL/tokenizer.json --renderer TEMPLATE"
        assert json.loads(text)["next"] == exact
        code, text = await run("--engine", url, "--mode", "text")
        assert f"next: {start} --messages-only" in text
        code, text = await run("--engine", url)
        lines = [" ".join(line.split()) for line in text.splitlines() if "usable " in line]
        unsafe = [line for line in lines if "special tokens in them included" in line]
        assert [line for line in lines if "exact" not in line] == unsafe != []


@pytest.mark.parametrize(
    ("model", "template"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("/models/qwen3-8b/", "qwen3"),
        ("Qwen3-8B", "qwen3"),
        ("mine/Qwen3-8B-tuned", None),
        ("", None),
    ],
)
def test_a_template_is_found_by_the_name_of_a_published_model(
    model: str, template: str | None
) -> None:
    """Folders of that name count as well; other names are not guessed."""
    assert find_template(model) == template
