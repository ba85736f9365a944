"""Request bodies of all APIs with wrong, huge, empty and misplaced values in them."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Json = Any
DIALECTS = Path(__file__).parents[1] / "chat" / "dialects"
_RAW = {
    "@huge": "1e400",
    "@nan": "NaN",
    "@exponent": "1e25",
    "@digits": "9" * 4000,
    "@more_digits": "9" * 5000,
    **{f"@list_{depth}": "[" * depth + "]" * depth for depth in (3, 60, 150, 400, 900)},
    **{
        f"@object_{depth}": '{"properties":' * depth + "{}" + "}" * depth
        for depth in (3, 60, 150, 400, 900)
    },
}
"""JSON that Python's values cannot express or hold, by the text that stands for it."""
NUMBERS = [
    *(0, 1, -1, 2, 2.5, -0.0, 1e-300, 1e300, 10**7 + 1, 10**9 + 1, 2**31 - 1, 2**31, 2**32),
    *(2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30, -(10**30)),
    *("@huge", "@nan", "@exponent", "@digits", "@more_digits"),
]
TEXTS = [
    *("", " ", "x", "\n", "nan", "null", "-1", "\0", "é界🙂", "\ud83d", "\udc00x", "<|im_end|>"),
    *("a" * 1024, "a" * 1025, "b" * 20_000, "{", '{"a": 1}', "[]", '{"n": 1' + "0" * 30 + "}"),
    *('{"a": "\\ud800"}', "<tool_call>", "data:image/png;base64,AA==", "https://x", "auto"),
]
OTHERS = [None, True, False, [], {}, [None], [[]], [{}], ["x"] * 70, {"": ""}, {"x": None}]
TYPES = ("text", "function", "custom", "object", "tool_use", "message", "none", "json_object")


def _draw_value(draw: random.Random, old: Json = None) -> Json:
    """A value, mostly of the type of `old`, which then passes more checks."""
    kind = draw.randrange(10)
    if draw.random() < 0.6 and not isinstance(old, bool | None):
        kind = {int: 0, float: 0, str: 4}.get(type(old), 7)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind < 7:
        return draw.choice(TEXTS)
    if kind < 9:
        return copy.deepcopy(draw.choice(OTHERS))
    return draw.choice([name for name in _RAW if "_" in name])


# --------------------------------------------------------------------------- bodies to mutate
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "A file", "minLength": 1},
        "lines": {"type": ["integer", "null"], "minimum": 0, "maximum": 1000, "default": 10},
        "mode": {"anyOf": [{"type": "string", "enum": ["r", "w"]}, {"type": "null"}]},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}, "maxItems": 9},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {"edit": {"type": "object", "properties": {"old": {"type": "string"}}}},
}
_READ = {"name": "read", "description": "Read a file"}
_FUNCTION = {**_READ, "parameters": SCHEMA}
TOOLS: dict[str, Json] = {
    "anthropic": [{**_READ, "input_schema": SCHEMA}],
    "openai_chat": [{"type": "function", "function": _FUNCTION}],
    "openai_responses": [{"type": "function", **_FUNCTION}],
    "google": [
        {"functionDeclarations": [{**_READ, "parametersJsonSchema": SCHEMA}]},
        {"functionDeclarations": [{"name": "write", "parameters": SCHEMA}]},
    ],
}
FIELDS: dict[str, Json] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["END"], "max_tokens": 9,
    "user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True,
}  # fmt: skip
MORE: dict[str, dict[str, Json]] = {
    "anthropic": {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["END"], "max_tokens": 9,
        "metadata": {"user_id": "u"}, "service_tier": "auto", "thread": {"type": "create"},
    },
    "openai_chat": {
        **FIELDS, "n": 1, "max_completion_tokens": 9, "logprobs": False, "top_logprobs": 0,
        "logit_bias": {}, "frequency_penalty": 0, "reasoning_effort": "low",
    },
    "openai_responses": {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "max_tool_calls": 3, "user": "u",
        "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k", "tool_choice": "auto",
        "reasoning": {"effort": "low"}, "seed": 3, "top_k": 4,
    },
    "openai_completions": {
        **FIELDS, "prompt": "2+2=", "n": 2, "logprobs": 0, "echo": False, "best_of": 1,
    },
    "google": {
        "generationConfig": {
            "temperature": 0.5, "topP": 0.9, "topK": 7, "maxOutputTokens": 9, "seed": 3,
            "stopSequences": ["END"], "candidateCount": 1, "thinkingConfig": {"thinkingBudget": 3},
        },
        "labels": {"a": "b"},
    },
}  # fmt: skip
_UNSERVED = ("response_format", "output_config", "text")
"""Structured output, which the embedded engine refuses."""
_PICTURES = {"image", "image_url", "input_image"}


def _drop_images(value: Json) -> Json:
    if isinstance(value, list):
        return [_drop_images(item) for item in value if not _is_image(item)]
    if isinstance(value, dict):
        return {name: _drop_images(item) for name, item in value.items()}
    return value


def _is_image(item: Json) -> bool:
    return isinstance(item, dict) and (item.get("type") in _PICTURES or "inlineData" in item)


@dataclass(frozen=True)
class Body:
    """A request body and its API."""

    dialect: str
    fields: dict[str, Json]


def seeds() -> list[Body]:
    """Return valid bodies of all APIs: those of the dialects' tests, with and without pictures."""
    bodies = []
    for name, fields in json.loads((DIALECTS / "full.json").read_text()).items():
        bodies.append(Body(name, {**fields, **MORE[name]}))
    for case in yaml.safe_load((DIALECTS / "requests.yaml").read_text()):
        if "path" not in case:
            bodies += [Body(case["dialect"], fields) for fields in case["bodies"]]
    plain = []
    for body in bodies:
        kept = {name: item for name, item in body.fields.items() if name not in _UNSERVED}
        plain.append(Body(body.dialect, _drop_images(kept)))
        tools = {"tools": TOOLS[body.dialect]} if body.dialect in TOOLS else {}
        plain.append(Body(body.dialect, {**_drop_images(kept), **MORE[body.dialect], **tools}))
    return bodies + plain * 2


# --------------------------------------------------------------------------- mutation
def _places(value: Json) -> Iterator[tuple[Json, Json]]:
    """Every container in a body with each of its keys."""
    keys: Json = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _mutate_once(draw: random.Random, body: dict[str, Json], dialect: str) -> None:
    places = list(_places(body))
    if draw.random() < 0.25 or not places:
        name = draw.choice([*FIELDS, *MORE[dialect], "n", "tools", "tool_choice"])
        body[name] = _draw_value(draw, {**FIELDS, **MORE[dialect]}.get(name))
        return
    if draw.random() < 0.3:  # a setting rather than a part of the conversation
        config = body.get("generationConfig")
        own = config if isinstance(config, dict) and config else body
        places = [(own, name) for name in own]
    where, key = draw.choice(places)
    match draw.randrange(8):
        case 0:
            del where[key]
        case 1 if isinstance(where, list):
            where.insert(key, copy.deepcopy(where[key]))
        case 1:
            where[draw.choice((*TYPES, *MORE[dialect], "\ud800", ""))] = where.pop(key)
        case 2:
            where[key] = [where[key]]
        case 3 if isinstance(where[key], dict):
            where[key][draw.choice(("maximum", "default", "x", "enum"))] = _draw_value(draw)
        case 4:
            where[key] = draw.choice(TYPES)
        case _:
            where[key] = _draw_value(draw, where[key])


def mutate(draw: random.Random, body: Body) -> bytes:
    """Return the JSON of `body` with one to three mutations."""
    fields = copy.deepcopy(body.fields)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _mutate_once(draw, fields, body.dialect)
    return dump(fields)


_HEADERS = (
    *("x-codex-turn-metadata", "thread-id", "x-session-id", "x-claude-code-session-id"),
    *("x-claude-code-agent-id", "x-codex-parent-thread-id", "x-openai-subagent"),
    *("x-stainless-retry-count", "content-encoding", "anthropic-version", "accept"),
)


def draw_headers(draw: random.Random) -> dict[str, str]:
    """Headers that clients send, in one request of four with a wrong value."""
    headers = {"content-type": "application/json"}
    if draw.random() < 0.25:
        texts = [text for text in TEXTS if text.isascii() and text.isprintable()]
        values = ['{"thread_id": "\\ud800"}', '{"thread_id": 1' + "0" * 30 + "}", "é", *texts]
        headers[draw.choice(_HEADERS)] = draw.choice([v for v in values if len(v) < 8000])
    return headers


def dump(fields: Json) -> bytes:
    """Encode a body, with its raw numbers and lone surrogates."""
    text = json.dumps(fields)
    return re.sub(r'"(@\w+)"', lambda match: _RAW[match[1]], text).encode()
