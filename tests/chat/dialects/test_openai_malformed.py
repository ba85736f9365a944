"""Whatever is wrong in an OpenAI request, it is either read or refused; never anything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tugline.chat.dialects.base import Dialect, HttpRequest, ParseCache
from tugline.chat.dialects.openai_chat import OpenAIChat
from tugline.chat.dialects.openai_responses import OpenAIResponses
from tugline.errors import RequestError

WRONG: list[Any] = [None, 5, True, "x", "", [], {}, [None], ["x"], [[]], {"type": "x"}, {"x": {}}]
FUNCTION = {"name": "r", "description": "d", "parameters": {}, "strict": False}
CHAT = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning": "x",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "r", "arguments": "{}"}},
                {"id": "b", "type": "custom", "custom": {"name": "p", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ],
    "tools": [
        {"type": "function", "function": FUNCTION},
        {"type": "custom", "custom": {"name": "p", "format": {"type": "text"}}},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "r"}}],
        },
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "stream_options": {"include_usage": True},
    "stop": ["a"],
    "n": 1,
}
RESPONSES = {
    "model": "m",
    "instructions": "x",
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "input": [
        {
            "type": "additional_tools",
            "tools": [
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": "u", "detail": "low"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_s1-0_0",
            "summary": [{"type": "summary_text", "text": "t"}],
            "encrypted_content": "tugline.SG0=",
        },
        {
            "type": "function_call",
            "id": "fc_s1-0_1",
            "name": "r",
            "call_id": "a",
            "arguments": "{}",
            "namespace": "n",
        },
        {"type": "custom_tool_call", "id": "x", "name": "p", "call_id": "b", "input": "x"},
        {
            "type": "local_shell_call",
            "id": "lsh_s1-1_0",
            "call_id": "c",
            "action": {"type": "exec", "command": ["l"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "lsh_s1-1_0", "output": "x"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "x"}],
        },
        {"type": "compaction", "encrypted_content": "tugline.SG0="},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "p"},
        {"type": "local_shell"},
    ],
    "tool_choice": {"type": "function", "name": "r"},
    "metadata": {},
    "reasoning": {"effort": "low"},
}


def spoilt(whole: Any) -> Iterator[Any]:
    """The body with one place left out, or holding something else, for every place in it."""
    for path in paths(whole, ()):
        *way, last = path
        for value in [..., *WRONG]:
            body = copy.deepcopy(whole)
            place = body
            for step in way:
                place = place[step]
            if value is ...:
                del place[last]
            else:
                place[last] = value
            yield body


def paths(value: Any, before: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where every value of a body stands."""
    steps = (
        value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    )
    for step in steps:
        yield (*before, step)
        yield from paths(value[step], (*before, step))


@pytest.mark.parametrize(
    ("dialect", "path", "whole"),
    [
        (OpenAIChat(), "/chat/completions", CHAT),
        (OpenAIResponses(), "/responses", RESPONSES),
        (OpenAIResponses(), "/responses/compact", RESPONSES),
    ],
    ids=["chat", "responses", "compact"],
)
def test_a_spoilt_body_is_read_or_refused(dialect: Dialect, path: str, whole: Any) -> None:
    """Every field in turn is missing or of another kind; nothing becomes a 500."""
    read = refused = 0
    bodies = [whole, *spoilt(whole)]
    for body in bodies:
        raw = json.dumps(body).encode()
        try:
            request = dialect.parse(HttpRequest("POST", "v1", path, "", {}, raw), ParseCache())
            dialect.stream(request, "s1-0", 17)
            read += 1
        except RequestError as error:
            refused += dialect.encode_error(error)[0] == 400
    assert read + refused == len(bodies)
    assert min(read, refused) > 100
