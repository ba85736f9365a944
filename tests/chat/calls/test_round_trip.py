"""Every call that a template writes is parsed to the call that was written, value for value."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from chat.calls.calls_drawn import VALUES, Drawn, drawn_tools, make_call
from support.tokenizer import GPT_OSS, OFFLINE, make_rendering
from tugline.chat.calls.values import strip_space
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.types import Ids, Message, Role, Tool, ToolCall

EXAMPLES = int(os.environ.get("TUGLINE_CALL_EXAMPLES", "50"))
ASKED = Message(Role.USER, "hi")
SHARES: dict[str, list[int]] = {}
"""Draws by template: all, and those that another allowed call renders to the same ids."""
MAX_SHARE = 0.05


@pytest.fixture(scope="module", autouse=True)
def _shares() -> Any:
    """Print the share of ambiguous draws, and bound it once there are enough draws."""
    yield
    for name, (all_draws, unclear) in SHARES.items():
        sys.stdout.write(f"{name}: {unclear} of {all_draws} draws are ambiguous\n")
    enough = {name: counts for name, counts in SHARES.items() if counts[0] >= 200}
    assert [name for name, (drawn, unclear) in enough.items() if unclear > MAX_SHARE * drawn] == []


def write(made: Rendering, calls: list[ToolCall], tools: list[Tool]) -> tuple[Ids, list[int]]:
    """The prompt and the answer with these calls, as the template renders them."""
    results = [Message(Role.TOOL, "r", tool_call_id=call.id) for call in calls]
    answer = Message(Role.ASSISTANT, "Look", tuple(calls))
    if made.name == "llama-3":
        answer = Message(Role.ASSISTANT, "", tuple(calls))
    prompt = made.render((ASKED,), tools).tolist()
    whole = made.render((ASKED, answer, *results), tools).tolist()
    shared = next(at for at, token in enumerate([*prompt, -1]) if token != whole[at])
    if made.name == "gpt-oss":  # the header of the answer is sampled whole
        shared = next(at for at in range(shared, 0, -1) if whole[at - 2] == made.start_id)
    end = next(at for at in range(shared, len(whole)) if whole[at] in made.stop_ids)
    end += whole[end] == made.markers.call_end
    return np.asarray(whole[:shared], np.int32), whole[shared:end]


def parse(made: Rendering, end: Ids, ids: list[int], cuts: list[int], tools: list[Tool]) -> Message:
    """The message of an answer that arrives in chunks."""
    parser = StreamParser(made, end[-64:], "0", tools=tools)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    for start, stop in pairwise(edges):
        parser.feed(ids[start:stop])
    message = parser.finish()[1]
    assert parser.malformed is None
    return message


def is_allowed(tool: Tool, arguments: Any) -> bool:
    """Whether the tool's schema allows the arguments, according to the `jsonschema` library."""
    return bool(jsonschema.Draft202012Validator(tool.parameters).is_valid(arguments))


def same(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal in value and type; keys may be in another order."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@pytest.mark.parametrize("name", [*OFFLINE, *(["gpt-oss"] if GPT_OSS else [])])
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
@given(
    drawn=st.lists(drawn_tools(), min_size=1, max_size=2, unique_by=lambda each: each[0].name),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
    byte_by_byte=st.booleans(),
)
def test_a_call_is_parsed_as_it_was_written(
    name: str, drawn: list[Drawn], cuts: list[int], *, byte_by_byte: bool
) -> None:
    """Name, values and types of each call come back, in any chunks, and render to the same ids."""
    made = make_rendering(name)
    drawn = drawn[:1] if name in ("llama-3", "gpt-oss") else drawn
    tools = [tool for tool, _ in drawn]
    end, ids = write(made, [make_call(at, each) for at, each in enumerate(drawn)], tools)
    cuts = list(range(len(ids))) if byte_by_byte else cuts
    message = parse(made, end, ids, cuts, tools)
    assert [call.name for call in message.tool_calls] == [tool.name for tool in tools]
    parsed = [json.loads(call.arguments) for call in message.tool_calls]
    calls = [
        make_call(at, (tool, arguments))
        for at, (tool, arguments) in enumerate(zip(tools, parsed, strict=True))
    ]
    assert write(made, calls, tools)[1] == ids
    ambiguous = False
    for (tool, arguments), found in zip(drawn, parsed, strict=True):
        if not same(found, arguments):
            assert is_allowed(tool, found), (found, arguments)
            ambiguous = True
    counts = SHARES.setdefault(name, [0, 0])
    counts[0] += 1
    counts[1] += ambiguous
    event(f"{name} ambiguous: {ambiguous}")


@given(
    value=VALUES,
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    half=st.sampled_from(["", "\ud83d"]),
)
def test_space_is_removed_between_the_parts_of_json_only(
    value: Any, indent: int | None, *, ascii_only: bool, half: str
) -> None:
    """Whatever JSON's layout, its compact form has the same texts, half surrogates and numbers."""
    whole = [value, half, 10**400]
    written = json.dumps(whole, indent=indent, ensure_ascii=ascii_only)
    compact = json.dumps(whole, separators=(",", ":"), ensure_ascii=ascii_only)
    assert strip_space(f" {written}\n") == compact
