"""Calls forbidden by ``tool_choice: none`` are banned where that is possible, else counted text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from support.engine import RENDERING, create_chat_app, reply_in_turn, reply_with
from support.gateway import ASK, open_session
from tugline.chat.engines.base import EngineRequest, Feature, Post
from tugline.chat.engines.chat import VllmChat
from tugline.chat.engines.generate import Embedded
from tugline.testing import ScriptedEngine
from tugline.web.engine_http import ModelCard
from tugline.web.serve import serve

CALL = '<tool_call>\n{"name": "read", "arguments": {"path":  "a.py"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
FUNCTION = {"name": "read", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
SUMMARISE = "The history is being compacted so moving forward, only your summary is left."


class Banning(Embedded):
    """An engine format that can ban ids, and keeps those of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.features = frozenset({Feature.BAN})
        self.banned: list[tuple[int, ...]] = []

    def build_request(self, request: EngineRequest) -> Post:
        """The request without bans, which the scripted engine would refuse."""
        self.banned.append(request.banned)
        return super().build_request(replace(request, banned=()))


def text_of(path: str, reply: dict[str, Any]) -> str:
    """The text of a reply without any tool call."""
    if path == "chat/completions":
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        return str(choice["message"]["content"])
    if path == "messages":
        assert reply["stop_reason"] == "end_turn"
        return "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    messages = [item for item in reply["output"] if item["type"] != "reasoning"]
    assert {item["type"] for item in messages} == {"message"}
    return "".join(part["text"] for item in messages for part in item["content"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"tools": CHAT_TOOLS, "tool_choice": "none"}),
        ("responses", {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"}),
        (
            "messages",
            {
                "tools": [{"name": "read", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "none"},
                "max_tokens": 999,
            },
        ),
    ],
    ids=["chat", "responses", "anthropic"],
)
async def test_a_forbidden_call_is_text_where_it_cannot_be_banned(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    """The client gets what the model wrote; the record counts the call, and nothing is masked."""
    messages = {"input": ASK} if path == "responses" else {"messages": ASK}
    async with open_session(tmp_path, reply_in_turn(ANSWER, "Done.")) as session:
        async with session.post_openai(path, **fields, **messages) as response:
            assert response.status == 200, await response.text()
            reply = await response.json()
        first = session.calls[0]
    assert text_of(path, reply) == f"I look.\n{CALL}"
    assert (first.forbidden_calls, first.constrained) == (1, False)
    assert first.answer is not None
    assert (first.answer.tool_calls, first.answer.reasoning) == ((), "Hm.")


async def test_the_text_of_a_forbidden_call_is_continued_exactly(tmp_path: Path) -> None:
    """The echo of the text is the answer; a stream has the same text as the whole answer."""
    fields: dict[str, Any] = {"tools": CHAT_TOOLS, "tool_choice": "none", "stream": True}
    async with open_session(tmp_path, reply_in_turn(ANSWER, "Done.")) as session:
        async with session.post_openai(**fields) as response:
            lines = (await response.text()).split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert not any("tool_calls" in delta for delta in deltas)
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == f"I look.\n{CALL}"
        history = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
        async with session.post_openai(messages=history, tools=CHAT_TOOLS) as response:
            assert response.status == 200
        assert [(call.parent, call.branch) for call in session.calls] == [(None, None), (0, None)]


async def test_only_an_answer_under_a_ban_is_constrained(tmp_path: Path) -> None:
    """A summary is sampled freely, and a choice without tools needs no ban."""
    wire = Banning()
    grown = [*ASK, {"role": "assistant", "content": "Hello."}]
    summary = [*grown, {"role": "user", "content": SUMMARISE}]
    async with open_session(tmp_path, reply_with("Hello."), wire=wire) as session:
        for messages, tools in ((ASK, CHAT_TOOLS), (ASK, []), (summary, CHAT_TOOLS)):
            async with session.post_openai(
                messages=messages, tools=tools, tool_choice="none"
            ) as response:
                assert response.status == 200, await response.text()
        calls = session.calls
    opening = RENDERING.markers.call
    assert wire.banned == [(opening,), (), ()]
    assert [call.constrained for call in calls] == [True, False, False]
    assert [call.kind for call in calls] == ["main", "side", "compaction"]


@pytest.mark.parametrize("choice", ["none", "required"])
async def test_an_engine_that_renders_constrains_forced_calls_only(
    tmp_path: Path, choice: str
) -> None:
    """An engine such as vLLM holds a forced call to a grammar, and samples freely otherwise."""
    engine = ScriptedEngine(reply_with("Hello."), vocab_size=RENDERING.tokenizer.size)
    async with serve(create_chat_app(engine, RENDERING.tokenizer)) as url:
        card = ModelCard("scripted", 20_000)
        async with open_session(
            tmp_path, url, wire=VllmChat(), card=card, rendering=None
        ) as session:
            async with session.post_openai(tools=CHAT_TOOLS, tool_choice=choice) as response:
                assert response.status == 200, await response.text()
            assert [call.constrained for call in session.calls] == [choice == "required"]
