"""The token counts that a client receives are those of the recording (I2, I4)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.engine import Play, ids, reply_with
from support.gateway import ASK, OpenSession, open_session, open_session_in_mode, text_of
from support.polling import until
from tugline.gateway.policy import CallSettings
from tugline.testing import Reply
from tugline.types import Call, Ids, Mode, TraceKind

FUNCTION = {"name": "read", "description": "Read", "parameters": {"type": "object"}}
PATHS = {
    "anthropic": "messages",
    "chat": "chat/completions",
    "responses": "responses",
    "completions": "completions",
    "google": "models/m:generateContent",
}
BODIES: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "m",
        "max_tokens": 400,
        "messages": ASK,
        "tools": [{"name": "read", "input_schema": {"type": "object"}}],
    },
    "chat": {"model": "m", "messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {"model": "m", "input": "Mend it.", "tools": [{"type": "function", **FUNCTION}]},
    "completions": {"model": "m", "prompt": "2+2=", "max_tokens": 400},
    "google": {
        "contents": [{"parts": [{"text": "Mend it."}]}],
        "tools": [{"functionDeclarations": [FUNCTION]}],
    },
}
NAMED: dict[str, dict[str, Any]] = {
    "anthropic": {"tool_choice": {"type": "tool", "name": "read"}},
    "chat": {"tool_choice": {"type": "function", "function": {"name": "read"}}},
    "responses": {"tool_choice": {"type": "function", "name": "read"}},
    "google": {
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["read"]}}
    },
}
ANY: dict[str, dict[str, Any]] = {
    "anthropic": {"tool_choice": {"type": "any"}},
    "chat": {"tool_choice": "required"},
    "responses": {"tool_choice": "required"},
    "google": {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
}
STOP: dict[str, dict[str, Any]] = {
    "anthropic": {"stop_sequences": ["three"]},
    "chat": {"stop": "three", "n": 2},
    "responses": {"stop": "three"},
    "completions": {"stop": ["three"], "n": 2},
    "google": {"generationConfig": {"stopSequences": ["three"], "candidateCount": 2}},
}
CHOICES = {"auto": {name: {} for name in PATHS}, "named": NAMED, "any": ANY, "stop": STOP}


class Figures(NamedTuple):
    """Token counts of an answer."""

    prompt: int
    sampled: int
    reused: int | None
    """None with Anthropic's API, whose clients would add the number to the prompt."""


def recorded(calls: Sequence[Call]) -> Figures:
    """The figures of the calls that answer one request."""
    first = calls[0]
    prompt = len(first.prompt_ids) - first.resumed + first.unreported_prompt_tokens
    counts = (c.resumed + len(c.sampled_ids) + c.unreported_tokens for c in calls)
    return Figures(prompt, sum(counts), None)


def read_usage(dialect: str, reply: Any) -> Figures:
    """The figures in the last usage of a reply, in any API's names."""
    usages: list[Any] = []

    def look(value: Any) -> None:
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name in ("usage", "usageMetadata") and inner:
                usages.append(inner)
            look(inner)
        for inner in value if isinstance(value, list) else ():
            look(inner)

    look(reply)
    usage = usages[-1]
    if dialect == "google":
        sampled = usage["candidatesTokenCount"] + usage.get("thoughtsTokenCount", 0)
        reused = usage.get("cachedContentTokenCount", 0)
        assert usage["totalTokenCount"] == usage["promptTokenCount"] + sampled
        return Figures(usage["promptTokenCount"], sampled, reused)
    if dialect == "anthropic":
        return Figures(usage["input_tokens"], usage["output_tokens"], None)
    prompt, sampled = (
        usage.get(f"{one}_tokens", usage.get(f"{other}_tokens"))
        for one, other in (("prompt", "input"), ("completion", "output"))
    )
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    assert usage["total_tokens"] == prompt + sampled
    return Figures(prompt, sampled, details["cached_tokens"])


async def ask(session: OpenSession, dialect: str, *, stream: bool, **fields: Any) -> Any:
    """The reply to a request, or the list of its events."""
    body, path = {**BODIES[dialect], **fields}, PATHS[dialect]
    version = "v1beta" if dialect == "google" else "v1"
    if stream and dialect == "google":
        path = "models/m:streamGenerateContent?alt=sse"
    elif stream:
        body["stream"] = True
    if stream and dialect in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    async with session.http.post(f"{session.url}/{version}/{path}", json=body) as response:
        text = await response.text()
    assert response.status == 200, text
    if not stream:
        return json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def answers() -> Play:
    """An engine that completes a forced call, or samples a text that holds the stop string."""
    call, free = ids('{"path": "a.py"}}\n</tool_call>'), ids("one two three four five six")
    turn = ids("\n", end=False)[-1]

    def reply(prompt: Ids, _request: str) -> Reply:
        return Reply(free if prompt[-1] in (turn, *ids("=", end=False)) else call)

    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
async def test_usage_is_that_of_the_recording(tmp_path: Path, mode: Mode, *, stream: bool) -> None:
    """Every API reports the recorded usage, with free, forced and stopped answers."""
    async with open_session_in_mode(tmp_path, answers(), mode) as session:
        for (name, choice), dialect in itertools.product(CHOICES.items(), PATHS):
            raw = dialect == "completions"
            if dialect not in choice or (raw and mode is not Mode.EXACT):
                continue
            before = session.calls
            reply = await ask(session, dialect, stream=stream, **choice[dialect])
            figures = read_usage(dialect, reply)
            calls = session.calls[len(before) :]
            assert figures._replace(reused=None) == recorded(calls), (dialect, name)
            assert bool(calls[0].forced) is (name in ("any", "named") and mode is Mode.EXACT)
            if figures.reused is not None and mode is Mode.EXACT:
                shared = max(
                    (prefix(calls[0], old) for old in before if old.kind is not TraceKind.SIDE),
                    default=0,
                )
                rendered = len(calls[0].prompt_ids) - calls[0].forced
                assert figures.reused == min(shared, rendered), (dialect, name)


def prefix(call: Call, old: Call) -> int:
    """Number of leading prompt ids of `call` that an earlier call has."""
    known = [*old.prompt_ids.tolist(), *old.sampled_ids.tolist()]
    pairs = zip(call.prompt_ids.tolist(), known, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


async def test_a_count_includes_the_ids_of_a_forced_call(tmp_path: Path) -> None:
    """Anthropic's count is the prompt of the answer's usage."""
    async with open_session(tmp_path, answers()) as session:
        for choice in ({}, NAMED["anthropic"], ANY["anthropic"]):
            body = {**BODIES["anthropic"], **choice}
            async with session.http.post(
                f"{session.url}/v1/messages/count_tokens", json=body
            ) as response:
                counted = (await response.json())["input_tokens"]
            reply = await ask(session, "anthropic", stream=False, **choice)
            assert read_usage("anthropic", reply).prompt == counted


async def test_a_resumed_answer_keeps_to_its_limit(tmp_path: Path) -> None:
    """The usage includes the part sampled before; both together have at most `max_tokens`."""
    text, tuning = "one two three four five six " * 4, CallSettings(grace_s=0.0)
    async with open_session(tmp_path, reply_with(text, delay_s=0.002), tuning=tuning) as session:
        body = session.body(stream=True, max_tokens=90)
        response = await session.post(body)
        seen = ""
        while len(text_of(seen)) < 20:
            seen += (await response.content.readany()).decode()
        response.close()
        await until(lambda: not session.live.running)
        async with session.post(body) as again:
            events = (await again.text()).splitlines()
        first, second = session.calls
    data = [json.loads(line[6:]) for line in events if line.startswith("data: ")]
    assert second.resumed == len(first.sampled_ids) > 0
    assert read_usage("anthropic", data) == recorded([second])
    assert second.resumed + len(second.sampled_ids) == 90


async def test_forced_ids_count_against_the_window(tmp_path: Path) -> None:
    """A prompt that fits only without its forced ids is an overflow, not an engine's refusal."""
    async with open_session(tmp_path, answers()) as session:
        plain = read_usage("anthropic", await ask(session, "anthropic", stream=False)).prompt
        forced = read_usage(
            "anthropic", await ask(session, "anthropic", stream=False, **NAMED["anthropic"])
        )
    for window in (plain + 1, forced.prompt, forced.prompt + 1):
        async with open_session(tmp_path / str(window), answers(), window=window) as session:
            async with session.post({**BODIES["anthropic"], **NAMED["anthropic"]}) as response:
                assert response.status == (200 if window > forced.prompt else 400)
                text = await response.text()
            assert response.status == 200 or "too long" in text
