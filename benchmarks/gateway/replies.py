"""The stub engine's responses for each turn, in vLLM's format, as bytes ready to be sent.

There are two routes: ``/inference/v1/generate``, which takes token ids, and
``/v1/chat/completions``, which returns prompt ids, sampled ids and logprobs. A streamed answer has
one event for each token, a usage event and ``[DONE]``: 514 events, each in its own HTTP chunk. With
a `stream_interval` of `INTERVAL`, an event has that many tokens, except the first, which has one.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from script import SAMPLED, Script, ScriptedAnswer, compact

from tugline.gateway.policy import DEFAULTS

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
INTERVAL = DEFAULTS.stream_interval
"""Tokens of an event in a coarse stream, which the gateway requests for unstreamed calls."""
_DONE = b"data: [DONE]\n\n"


class Streamed(msgspec.Struct, frozen=True):
    """A streamed answer: the response head, and one HTTP chunk for each event."""

    head: bytes
    chunks: list[bytes]
    visible: int
    """Index of the first chunk whose token is visible to a client."""


class Replies(msgspec.Struct, frozen=True):
    """All answers of one route, indexed by turn."""

    whole: list[bytes]
    streamed: list[Streamed]
    coarse: list[Streamed]


def write(script: Script, routes: Sequence[str]) -> dict[str, Replies]:
    """Make all answers of these routes."""
    turns = range(script.turns)
    written: dict[str, Replies] = {}
    if GENERATE in routes:
        whole = [_complete(_generated(script, turn)) for turn in turns]
        written[GENERATE] = Replies(whole, *_streams(_generated_stream, script))
    if CHAT in routes:
        whole = [_complete(_completed(script, turn)) for turn in turns]
        written[CHAT] = Replies(whole, *_streams(_completed_stream, script))
    return written


def _streams(
    make: Callable[[Script, int, Sequence[int]], Streamed], script: Script
) -> tuple[list[Streamed], list[Streamed]]:
    """Make fine and coarse streams; `make` gets the numbers of tokens after each event."""
    fine, coarse = range(1, SAMPLED + 1), [*range(1, SAMPLED, INTERVAL), SAMPLED]
    turns = range(script.turns)
    return [make(script, t, fine) for t in turns], [make(script, t, coarse) for t in turns]


def _complete(body: dict[str, Any]) -> bytes:
    data = compact(body)
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _streamed(
    script: Script, turn: int, events: list[dict[str, Any]], ends: Sequence[int]
) -> Streamed:
    chunks = [b"data: " + compact(event) + b"\n\n" for event in events] + [_DONE]
    leading = len(events) - len(ends) - 1  # a role event before the first token, on the chat route
    return Streamed(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks],
        leading + bisect_right(ends, _visible(script, script.answers[turn])),
    )


def _visible(script: Script, answer: ScriptedAnswer) -> int:
    """Index of the first token that is neither markup nor white space."""
    texts = (script.tokenizer.decode([token]) for token in answer.ids.tolist())
    return next(i for i, text in enumerate(texts) if text.strip() and not text.startswith("<"))


def _usage(script: Script, turn: int) -> dict[str, Any]:
    prompt = len(script.prompts[turn])
    return {"prompt_tokens": prompt, "total_tokens": prompt + SAMPLED, "completion_tokens": SAMPLED}


# --------------------------------------------------------------------------- token-in route
def _generated(script: Script, turn: int) -> dict[str, Any]:
    choice = _generated_choice(script.answers[turn], 0, SAMPLED)
    return {
        "request_id": f"generate-tokens-{turn}",
        "choices": [choice],
        "usage": _usage(script, turn),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "output_mode": "tokens",
    }


def _generated_stream(script: Script, turn: int, ends: Sequence[int]) -> Streamed:
    start = {"request_id": f"generate-tokens-{turn}"}
    answer = script.answers[turn]
    events: list[dict[str, Any]] = [
        {**start, "choices": [_generated_choice(answer, begin, end)]}
        for begin, end in pairwise([0, *ends])
    ]
    events.append({**start, "choices": [], "usage": _usage(script, turn)})
    return _streamed(script, turn, events, ends)


def _generated_choice(answer: ScriptedAnswer, start: int, end: int) -> dict[str, Any]:
    ids, logprobs = answer.ids[start:end].tolist(), answer.logprobs[start:end].tolist()
    last = end == SAMPLED
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    return {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop" if last else None,
        "stop_reason": ids[-1] if last else None,
        "token_ids": ids,
        "weight_versions": [{"version": "1", "start": 0, "end": SAMPLED}] if last else None,
    }


# --------------------------------------------------------------------------- chat route
def _head(turn: int, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{turn:032x}",
        "object": kind,
        "created": 1_760_000_000,
        "model": "stub",
    }


def _logprobs(script: Script, answer: ScriptedAnswer, start: int, end: int) -> dict[str, Any]:
    pairs = zip(answer.ids[start:end].tolist(), answer.logprobs[start:end].tolist(), strict=True)
    content = []
    for token, logprob in pairs:
        text = script.tokenizer.decode([token])
        content.append(
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        )
    return {"content": content}


def _completed(script: Script, turn: int) -> dict[str, Any]:
    answer = script.answers[turn]
    function = {"name": answer.name, "arguments": json.dumps(answer.arguments)}
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": f"\n\n{answer.text}\n",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [
                {"id": f"chatcmpl-tool-{turn:032x}", "type": "function", "function": function}
            ],
            "reasoning": f"\n{answer.reasoning}\n",
        },
        "logprobs": _logprobs(script, answer, 0, SAMPLED),
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": answer.ids.tolist(),
    }
    return {
        **_head(turn, "chat.completion"),
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0",
        "usage": {**_usage(script, turn), "prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": script.prompts[turn].tolist(),
        "prompt_text": None,
        "kv_transfer_params": None,
    }


def _spoken(answer: ScriptedAnswer, turn: int, begin: int, end: int) -> dict[str, Any]:
    """Spread reasoning over the first half of the tokens and text over the second; calls follow."""
    half = SAMPLED // 2
    parts: dict[str, Any] = {}
    for name, text, start in (
        ("reasoning", f"\n{answer.reasoning}\n", 0),
        ("content", f"\n\n{answer.text}\n", half),
    ):
        low, high = (min(max(at - start, 0), half) * len(text) // half for at in (begin, end))
        if low < high:
            parts[name] = text[low:high]
    if end == SAMPLED:
        function = {"name": answer.name, "arguments": json.dumps(answer.arguments)}
        call = {"index": 0, "id": f"chatcmpl-tool-{turn:032x}", "type": "function"}
        parts["tool_calls"] = [{**call, "function": function}]
    return parts


def _completed_stream(script: Script, turn: int, ends: Sequence[int]) -> Streamed:
    answer = script.answers[turn]
    head = _head(turn, "chat.completion.chunk")
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
    events: list[dict[str, Any]] = [
        {
            **head,
            "choices": [{**first, "finish_reason": None}],
            "prompt_token_ids": script.prompts[turn].tolist(),
        }
    ]
    for begin, end in pairwise([0, *ends]):
        last, ids = end == SAMPLED, answer.ids[begin:end].tolist()
        choice = {
            "index": 0,
            "delta": _spoken(answer, turn, begin, end),
            "logprobs": _logprobs(script, answer, begin, end),
            "finish_reason": "stop" if last else None,
            "stop_reason": ids[-1] if last else None,
            "token_ids": ids,
        }
        events.append({**head, "choices": [choice]})
    events.append({**head, "choices": [], "usage": _usage(script, turn)})
    return _streamed(script, turn, events, ends)
