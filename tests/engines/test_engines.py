"""The gateway in front of real engines; log probabilities are compared with a forward pass."""

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from conformance.programs import exact
from engines import servers
from engines.conftest import FURTHEST, Served
from engines.tool_model import RECITE, TOOLS, WINDOW
from inference.tiny_model import truth
from recording.verify.recorded import read_in
from support.polling import until
from support.tasks import make_task
from tugline.chat.engines import ROUTES
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.app import Gateway
from tugline.gateway.probe import CheckOutcome
from tugline.gateway.replicas import Upstream
from tugline.node.admission import Engines
from tugline.recording.verify.engine import connect_scorer
from tugline.recording.verify.session import VerifyVerdict, verify_logprobs, verify_session
from tugline.recording.verify.text import TextVerifier
from tugline.traces.base import PrefixMerging
from tugline.types import Call, LogprobMeaning, Logprobs, Mode, Sampling, Session
from tugline.types import CallOutcome as End
from tugline.web.engine_http import EngineHttp

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
ROUTE_NAMES = ("generate", "completions", "chat")
WARM = Sampling(temperature=1.0, top_p=1.0, top_k=0)
CALM = Sampling(temperature=0.5, top_p=1.0, top_k=0)
"""For tests that depend on the text: at temperature 1 the tiny model may leave its patterns."""
LONG_WINDED: list[Any] = [{"role": "user", "content": RECITE}]
STREAMED = 1500
"""Tokens of a recitation that a client streams."""
LONG = 7000
"""Tokens of a recitation that does not end by itself."""
_RUNNING = re.compile(
    rb"^\w+:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE
)
CLOSE = 1e-4
"""Largest difference, in nats, between a captured logprob and a recomputed one."""


class Bench:
    """A gateway in front of the engine, one open session, and the official SDK as its client."""

    def __init__(
        self, served: Served, gateway: Gateway, url: str, key: str, session: str = "s1"
    ) -> None:
        self.served, self.gateway, self.session = served, gateway, session
        self.client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120
        )
        self.usage: Any = None
        """Token counts of the last recitation, once it is complete."""

    async def ask(self, messages: list[Any], **options: Any) -> Any:
        """One chat completion."""
        return await self.client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, **options
        )

    async def turn(self, messages: list[Any], **options: Any) -> Any:
        """Ask, and answer the tool calls; `messages` grows by what a harness would add."""
        choice = (await self.ask(messages, **options)).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls or []:
            path = json.loads(call.function.arguments).get("path", "")
            content = f"stone {path.removesuffix('.txt')} quay"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return choice

    async def recite(self, limit: int = STREAMED) -> AsyncGenerator[str, None]:
        """The pieces of a long streamed answer."""
        usage = {"include_usage": True}
        stream = await self.ask(LONG_WINDED, max_tokens=limit, stream=True, stream_options=usage)
        async with stream:
            async for chunk in stream:
                self.usage = chunk.usage or self.usage
                for choice in chunk.choices:
                    # engines take an answer without </think> for one long thought
                    thought = getattr(choice.delta, "reasoning_content", None)
                    yield choice.delta.content or thought or ""

    def decode(self, call: Call) -> str:
        """The text of its answer."""
        tokenizer = Tokenizer.load(self.served.folders.first)
        return tokenizer.decode(call.sampled_ids.tolist()).strip()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The recorded calls on disk."""
        return self.gateway.read_calls(self.session)

    async def running(self) -> int:
        """Requests on the engine."""
        async with EngineHttp(self.served.url) as engine:
            async with engine.request(f"{engine.url}/metrics") as reply:
                found = _RUNNING.findall(await reply.read())
            if found:
                return int(sum(map(float, found)))
            loads = (await engine.get_object("/v1/loads"))["loads"]
        return sum(int(load["num_running_reqs"] + load["num_waiting_reqs"]) for load in loads)

    async def idle(self) -> bool:
        """Whether the engine has nothing to do."""
        return await self.running() == 0


@asynccontextmanager
async def open_bench(
    served: Served,
    route: str,
    folder: Path,
    sampling: Sampling = WARM,
    *more: str,
    name: str = "s1",
) -> AsyncIterator[Bench]:
    """One session, open while the block lasts, on the engine and `more` replicas of it.

    Its logprobs have the meaning that the probe has reported.
    """
    meaning = (await served.get_report()).logprob_meaning
    if route not in ROUTES[served.name]:
        pytest.skip(f"{served.name} has no route {route}")
    wire = ROUTES[served.name][route](meaning or LogprobMeaning.PROCESSED)
    tokenizer = Tokenizer.load(served.folders.first)
    rendering = Rendering(tokenizer, "qwen3") if wire.mode is Mode.EXACT else None
    session = Session(id=name, task="t", sample=0)
    async with (
        Gateway(Upstream([served.url, *more], wire), rendering, folder) as gateway,
        gateway.open(session, make_task("t", sampling=sampling)) as opened,
    ):
        await gateway.set_weights_version(served.version)
        bench = Bench(served, gateway, opened.base_url, opened.key, name)
        async with bench.client:
            yield bench


def gaps(served: Served, call: Call, weights: int = 0) -> Logprobs:
    """How far each captured logprob is from a plain forward pass of these weights."""
    raw = call.logprob_meaning is LogprobMeaning.RAW
    heat = 1.0 if raw else call.sampling.temperature or 1.0
    right = truth(served.models[weights], call.prompt_ids, call.sampled_ids, heat)
    return np.asarray(np.abs(right - call.logprobs), np.float32)


def check_logprobs(served: Served, calls: Sequence[Call]) -> float:
    """Recompute every captured logprob under the first weights; the largest difference."""
    worst = max(float(gaps(served, call).max()) for call in calls)
    assert worst < CLOSE
    return worst


def crowd() -> float:
    """Factor for time limits on a machine that is busy with other work; 1 or more."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


# --------------------------------------------------------------------------- the probe
async def test_probe_identifies_each_engine(served: Served) -> None:
    """Exact mode is sound on every engine; raw logprobs are distinguished from processed ones."""
    report = await served.get_report()
    meanings = {"vllm": LogprobMeaning.RAW}
    assert report.engine == served.name
    assert (report.model, report.window) == ("tiny", WINDOW)
    assert report.mode is Mode.EXACT
    assert report.sound
    assert report.logprob_meaning is meanings.get(served.name, LogprobMeaning.PROCESSED)
    assert [check for check in report.checks if check.outcome is not CheckOutcome.PASS] == []
    if served.name != "embedded":  # the embedded engine serves token ids only
        assert report.wire(Mode.OBSERVED).mode is Mode.OBSERVED
    flags = " ".join(report.advice)
    assert ("--logprobs-mode processed_logprobs" in flags) is (served.name == "vllm")


async def test_the_load_of_an_engine_is_read(served: Served, tmp_path: Path) -> None:
    """Requests are counted while they run, and tokens are those of the recorded calls."""
    route = ROUTE_NAMES[0]
    async with Engines([served.url]) as engines, open_bench(served, route, tmp_path) as bench:
        load = engines.loads[served.url]

        async def sampled() -> tuple[float, float]:
            await engines.poll()
            return load.prompt_tokens or 0.0, load.sampled_tokens or 0.0

        await until(bench.idle)
        before = await sampled()
        most = 0.0
        async for _ in bench.recite():
            await engines.poll()
            most = max(most, load.running)
        assert most == 1
        assert load.kv is None if served.name == "embedded" else 0 <= (load.kv or 0) < 1
        (call,) = bench.calls
        counts = len(call.prompt_ids), len(call.sampled_ids)

        async def counted() -> bool:
            now = await sampled()
            return (now[0] - before[0], now[1] - before[1]) == counts

        await until(counted, 30)
        assert (load.waiting, load.up) == (0, True)
        assert load.busy_s > 0


# --------------------------------------------------------------------------- sessions
@pytest.mark.parametrize("name", ROUTE_NAMES)
async def test_a_tool_session_is_captured_token_by_token(
    served: Served, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Four turns with parallel tool calls are one sequence, with logprobs as recomputed.

    A session is checked as a whole, since a real engine is slow.
    """
    async with open_bench(served, name, tmp_path, CALM) as bench:
        messages: list[Any] = [
            {"role": "system", "content": "You help with stone."},
            {"role": "user", "content": "Mend north wharf."},
        ]
        first = await bench.turn(messages)
        assert first.finish_reason == "tool_calls"
        assert [call.function.name for call in first.message.tool_calls] == ["read", "read"]
        assert first.message.content.strip() == "Let me look."
        assert first.message.reasoning_content.strip().startswith("The user asks for")
        second = await bench.turn(messages)
        assert second.finish_reason == "stop"
        assert second.message.content.strip().startswith("It is")
        messages.append({"role": "user", "content": "Find pine quay."})
        await bench.turn(messages)
        await bench.turn(messages)
        calls = bench.calls
    assert len(calls) == 4
    assert {call.mode for call in calls} == {Mode.OBSERVED if name == "chat" else Mode.EXACT}
    assert {span.version for call in calls for span in call.versions} == {served.version}
    request.node.user_properties.append((FURTHEST, check_logprobs(served, calls)))
    assert exact(calls)
    assert [call.branch for call in calls] == [None] * 4
    traces = PrefixMerging().build(calls).traces
    sampled = sum(len(call.sampled_ids) for call in calls)
    assert sum(int(trace.mask.sum()) for trace in traces) == sampled


@pytest.mark.parametrize("name", ["generate", "chat"])
async def test_streaming_is_real(served: Served, name: str, tmp_path: Path) -> None:
    """Text comes while the engine is still sampling; the streamed text equals the recorded one."""
    async with open_bench(served, name, tmp_path, CALM) as bench:
        text, early = "", False
        async for piece in bench.recite():
            if piece and not text:
                early = not bench.calls
            text += piece
        (call,) = bench.calls
    assert early, "the first text came when the last token was on disk already"
    assert bench.usage.completion_tokens == len(call.sampled_ids) == STREAMED
    assert bench.usage.prompt_tokens == len(call.prompt_ids)
    assert text.strip() == bench.decode(call)
    check_logprobs(served, (call,))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", ["generate", "chat"])
async def test_a_client_that_hangs_up_frees_the_engine(
    served: Served, name: str, tmp_path: Path, *, stream: bool
) -> None:
    """The engine is idle two seconds later, and the tokens sampled so far are recorded."""
    async with open_bench(served, name, tmp_path, CALM) as bench:
        if stream:
            async with aclosing(bench.recite(LONG)) as pieces:
                while not await anext(pieces):
                    pass
        else:
            asking = asyncio.create_task(bench.ask(LONG_WINDED, max_tokens=LONG))
            await asyncio.sleep(1)
            asking.cancel()
            await asyncio.wait({asking}, timeout=5)
        await until(bench.idle, 2 * crowd())
        await until(lambda: bench.calls, 2 * crowd())
        (call,) = bench.calls
    seen = (call.outcome, call.finish, len(call.sampled_ids), call.unreported_tokens)
    assert call.outcome is End.CLIENT_GONE or not stream, seen
    counted = len(call.sampled_ids) or call.unreported_tokens
    assert 0 < counted < LONG
    if len(call.sampled_ids):
        check_logprobs(served, (call,))
    else:
        assert (served.name, name) == ("sglang", "chat"), "only this route sends its ids last"
        assert call.mode is Mode.TEXT


async def test_another_replica_ends_the_answer_of_one_that_was_killed(
    served: Served, tmp_path: Path
) -> None:
    """An engine is killed during an answer: the client gets one answer, recorded as one call.

    The second replica is a real one, too, with the same weights; every token on either side of
    the cut has the logprob of a plain forward pass over all ids before it.
    """
    with servers.running(served.name, served.folders.first, tmp_path) as other:
        for number in range(20):  # until a session is assigned to the other engine
            name = f"s{number}"
            async with open_bench(
                served, "generate", tmp_path, CALM, other.url, name=name
            ) as bench:
                await bench.ask([{"role": "user", "content": "Mend north wharf."}], max_tokens=1)
                if bench.calls[0].replicas != (other.url,):
                    continue
                pieces = []
                async for piece in bench.recite():
                    pieces.append(piece)
                    if len(pieces) == 100:
                        other.kill()
                call = bench.calls[-1]
                break
        else:
            pytest.fail("no session of 20 went to the other replica")
    assert call.replicas == (other.url, served.url)
    assert len(call.sampled_ids) == STREAMED
    assert "".join(pieces).strip() == bench.decode(call)
    check_logprobs(served, (call,))


@pytest.mark.parametrize("name", ["generate", "completions"])
async def test_an_answer_is_held_to_a_schema(served: Served, name: str, tmp_path: Path) -> None:
    """The engine samples under the constraint, or refuses it by name.

    The logprobs are those under the grammar and not of the policy: the call is marked.
    """
    # no object: between its parts a tiny model may put blank space for ever
    schema = {"enum": ["read", "write"]}
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Mend north wharf."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "max_tokens": 200,
    }
    async with open_bench(served, name, tmp_path, CALM) as bench:
        if served.name == "embedded":
            with pytest.raises(openai.BadRequestError, match="structured output"):
                await bench.client.chat.completions.create(**asked)
            assert not bench.calls
            return
        answer = await bench.client.chat.completions.create(**asked)
        (call,) = bench.calls
    value = json.loads(answer.choices[0].message.content)
    assert value in {"read", "write"}
    assert call.constrained
    assert float(gaps(served, call).max()) > CLOSE, "they are those under the grammar"


# --------------------------------------------------------------------------- weights
async def swap(bench: Bench, folder: Path, version: int) -> None:
    """Change the weights as a trainer does between two updates."""
    await bench.gateway.pause("keep")
    async with bench.served.weights() as weights:
        await weights.pause("keep")
        await weights.load(folder, version)
        await bench.gateway.set_weights_version(version)
        await weights.resume()
    await bench.gateway.resume()


async def test_versions_are_recorded_per_token_of_an_answer(served: Served, tmp_path: Path) -> None:
    """Each of two spans has the logprobs of its own weights, and not of the others."""
    old, new = served.version, served.version + 1
    async with open_bench(served, "generate", tmp_path, CALM) as bench:
        swapping: asyncio.Task[None] | None = None
        try:
            seen = 0
            async for piece in bench.recite():
                seen += bool(piece)
                if seen > 20 and swapping is None:
                    swapping = asyncio.create_task(swap(bench, served.folders.second, new))
            await swapping
            (call,) = bench.calls
        finally:
            served.version = new + 1
            await swap(bench, served.folders.first, served.version)
    first, second = call.versions
    assert (first.version, first.start, first.end) == (old, 0, second.start)
    assert (second.version, second.end) == (new, len(call.sampled_ids))
    before, after = gaps(served, call, 0), gaps(served, call, 1)
    assert before[: first.end].max() < CLOSE < 0.01 < after[: first.end].max()
    assert before[second.start :].max() > 0.01
    if served.name != "embedded":  # it keeps the context that the old weights computed
        assert after[second.start :].max() < CLOSE


@pytest.mark.parametrize("name", ROUTE_NAMES)
async def test_weights_that_change_between_turns_leave_no_old_context(
    served: Served, name: str, tmp_path: Path
) -> None:
    """The turn after a swap is of the new version alone, without a cached prefix."""
    old, new = served.version, served.version + 1
    async with open_bench(served, name, tmp_path, CALM) as bench:
        messages: list[Any] = [{"role": "user", "content": "Mend north wharf."}]
        try:
            await bench.turn(messages)
            await swap(bench, served.folders.second, new)
            await bench.turn(messages)
            before, after = bench.calls
        finally:
            served.version = new + 1
            await swap(bench, served.folders.first, served.version)
        messages.append({"role": "user", "content": "Find pine quay."})
        await bench.turn(messages)
        last = bench.calls[-1]
    versions = [[span.version for span in call.versions] for call in (before, after, last)]
    assert versions == [[old], [new], [served.version]]
    check_logprobs(served, (before, last))
    assert gaps(served, after, 1).max() < CLOSE < 0.01 < gaps(served, after, 0).max()


# --------------------------------------------------------------------------- limits
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", ["generate", "chat"])
async def test_a_prompt_beyond_the_window_is_the_error_harnesses_know(
    served: Served, name: str, tmp_path: Path, *, stream: bool
) -> None:
    """The error is a 400 with OpenAI's code, from gateway or engine; the session continues."""
    async with open_bench(served, name, tmp_path) as bench:
        long = [{"role": "user", "content": "stone " * WINDOW}]
        with pytest.raises(openai.BadRequestError) as caught:
            await bench.ask(long, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert not bench.calls
        await bench.turn([{"role": "user", "content": "Mend north wharf."}])
        assert len(bench.calls) == 1


# --------------------------------------------------------------------------- verification
@pytest.mark.parametrize("sampling", [WARM, CALM], ids=["t1", "t0.5"])
@pytest.mark.parametrize("name", ["generate", "chat"])
async def test_verify_agrees_with_the_scores_of_the_engine(
    served: Served, name: str, sampling: Sampling, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Logprobs of decoding equal those of scoring, where both have the same meaning."""
    async with open_bench(served, name, tmp_path, sampling) as bench:
        messages: list[Any] = [{"role": "user", "content": "Mend north wharf."}]
        for _ in range(2):
            choice = await bench.turn(messages, max_tokens=400)  # the model may not end by itself
            if not choice.message.tool_calls:  # at temperature 1 a tiny model may only talk
                messages.append({"role": "user", "content": "Mend east wharf."})
        path, recording = read_in(tmp_path)
        report = verify_session(path, recording, TextVerifier(served.folders.first))
        async with connect_scorer(served.url) as scorer:
            assert scorer.version == served.version
            await verify_logprobs(report, recording, scorer, CLOSE)
    assert not report.failed, report
    assert [turn.scored for turn in report.turns] == [turn.sampled for turn in report.turns]
    check = report.checks["engine"]
    if served.name == "sglang" and sampling is CALM:
        assert check.verdict is VerifyVerdict.UNCHECKED
        assert "captured at temperature 0.5, this engine recomputes at 1" in check.detail
        return
    assert check.verdict is VerifyVerdict.PASS
    worst = max(turn.max_dlogprob or 0.0 for turn in report.turns)
    request.node.user_properties.append((FURTHEST, worst))
    assert worst < CLOSE


async def test_scoring_stops_at_the_limit_of_the_engine(served: Served) -> None:
    """SGLang scores a few ids less than it samples; the rest is NaN."""
    start = WINDOW - 20
    async with connect_scorer(served.url) as scorer:
        assert scorer.max_ids == WINDOW - (7 if served.name == "sglang" else 1)
        scores = await scorer.score(np.arange(WINDOW, dtype=np.int32) % 200 + 10, start)
    assert np.isfinite(scores).tolist() == [start + n < scorer.max_ids for n in range(20)]
