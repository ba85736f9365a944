"""The dialects, driven by neutral messages, so that one test can hold for all of them.

A `Wire` writes messages as a client of its dialect sends them, and puts replies together as such a
client does, whole or from the events of a stream.
"""

# ruff: noqa: RUF012  # tables that nothing changes
from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tugline.chat.dialects.anthropic import Anthropic
from tugline.chat.dialects.base import Dialect, HttpRequest
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.dialects.google import Google
from tugline.chat.dialects.openai_chat import OpenAIChat, OpenAICompletions
from tugline.chat.dialects.openai_responses import OpenAIResponses
from tugline.chat.model_call import (
    Piece,
    ReasoningDelta,
    Request,
    Response,
    TextDelta,
    Usage,
    serialize_message,
)
from tugline.types import Finish, Message, Role

Json = dict[str, Any]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3).map(json.dumps)
INPUTS = TEXT.map(lambda text: json.dumps({"input": text}))
COMMANDS = st.fixed_dictionaries(
    {"command": st.lists(TEXT, max_size=3)},
    optional={"timeout_ms": st.none() | st.integers(0, 9), "env": st.dictionaries(TEXT, TEXT)},
).map(json.dumps)
READ = st.tuples(st.just("read"), ARGUMENTS | TEXT)
PATCH = st.tuples(st.just("patch"), INPUTS | TEXT | ARGUMENTS)
SHELL = st.tuples(st.just("local_shell"), COMMANDS | ARGUMENTS)
AGENTS = st.tuples(st.sampled_from(["agents__spawn", "unknown"]), ARGUMENTS | TEXT)


def neutral(request: Request) -> Request:
    """A request without what is its dialect's own."""
    return Request(**{name: getattr(request, name) for name in Request.__struct_fields__})


def finished(message: Message, **more: Any) -> Response:
    """A finished response with `message` as its answer."""
    fields = {"finish": Finish.STOP, "usage": Usage(31, 7, 20, 2), **more}
    return Response(id="s1-4", model="m", created=1_700_000_000, message=message, **fields)


def pieces_of(message: Message, *, single: bool = False) -> list[Piece]:
    """The pieces of a streamed message; with `single` one for each character."""

    def cut(text: str | None) -> Sequence[str]:
        return list(text or "") if single else [text] if text else []

    pieces: list[Piece] = [ReasoningDelta(part) for part in cut(message.reasoning)]
    pieces += [TextDelta(part) for part in cut(message.content)]
    return [*pieces, *message.tool_calls]


def sse(stream: bytes) -> list[Json]:
    """The data of server-sent events, each checked against its name."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        if event.startswith(":"):
            continue
        name, _, data = event.rpartition("\n")
        if data == "data: [DONE]":
            continue
        found.append(json.loads(data.removeprefix("data: ")))
        assert name in ("", f"event: {found[-1].get('type')}")
    return found


def compact(arguments: str) -> str:
    """Arguments as JavaScript writes them, if they are JSON."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class Wire(ABC):
    """One dialect."""

    dialect: Dialect
    path: str
    fields: Json = {}
    """Fields that every request has."""

    def request(self, body: Any, path: str | None = None, **more: Any) -> HttpRequest:
        """An HTTP request with this body."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"version": "v1", "query": "alt=sse", "headers": {}, **more}
        return HttpRequest(method="POST", path=path or self.path, body=raw, **fields)

    def parse(self, body: Json, cache: ParseCache | None = None, **more: Any) -> Request:
        """The neutral request of this body."""
        return self.dialect.parse(
            self.request({**self.fields, **body}, **more), cache or ParseCache()
        )

    def hello(self, **fields: Any) -> Request:
        """A short request with these fields."""
        return self.parse({**self.write([Message(Role.USER, "Hi")]), **fields})

    @abstractmethod
    def write(self, messages: Sequence[Message]) -> Json:
        """The fields of a request that hold the conversation."""

    def whole(self, request: Request, message: Message, **more: Any) -> Json:
        """The whole reply."""
        reply: Json = json.loads(self.dialect.encode(request, [finished(message, **more)]))
        return reply

    def streamed(
        self, request: Request, message: Message, *, single: bool = False, **more: Any
    ) -> bytes:
        """The bytes of the streamed reply."""
        stream = self.dialect.stream(request, "s1-4", 1_700_000_000)
        sent = stream.start(Usage(31, 0)) + stream.keep_alive()
        sent += b"".join(stream.add(piece) for piece in pieces_of(message, single=single))
        return sent + stream.finish([finished(message, **more)])


class TalkWire(Wire):
    """One dialect of conversations."""

    calls: st.SearchStrategy[tuple[str, str]] = READ
    """Tool calls of an answer."""
    rewrites: tuple[str, ...]
    """Ways in which its clients change an answer that they send back."""
    tools: Any
    """`read`, and the tools of `calls`."""
    more: Json = {}
    """Fields of requests whose answer is echoed."""

    @abstractmethod
    def answer(self, reply: Json) -> Any:
        """The answer in a whole reply, as a client keeps it."""

    @abstractmethod
    def collect(self, stream: bytes) -> Any:
        """The answer in a stream, as a client keeps it."""

    @abstractmethod
    def echo(self, answer: Any, rewrite: str) -> Json:
        """A request that sends the answer back: a user, the answer, a user."""

    @abstractmethod
    def reason(self, reply: Json) -> str:
        """Why the answer ended."""


class _AnthropicWire(TalkWire):
    """Anthropic Messages."""

    dialect = Anthropic()
    path = "/messages"
    rewrites = ("verbatim", "cached", "string")
    tools = [{"name": "read", "description": "Read", "input_schema": {"type": "object"}}]
    fields = {"model": "m", "max_tokens": 100}

    def write(self, messages: Sequence[Message]) -> Json:
        """Results of tools are blocks of a user."""
        body: Json = {"messages": []}
        for message in messages:
            if message.role is Role.SYSTEM:
                body["system"] = message.content
                continue
            blocks: list[Json] = []
            if message.reasoning:
                blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
            blocks += [{"type": "text", "text": message.content}] if message.content else []
            for image in message.images:
                data = image.url.removeprefix("data:image/png;base64,")
                source = {"type": "base64", "media_type": "image/png", "data": data}
                blocks.append({"type": "image", "source": source})
            for call in message.tool_calls:
                arguments = json.loads(call.arguments)
                use = {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
                blocks.append(use)
            role = message.role.value
            if message.role is Role.TOOL:
                result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
                role, blocks = "user", [{**result, "content": blocks}]
            body["messages"].append({"role": role, "content": blocks})
        return body

    def answer(self, reply: Json) -> Any:
        return reply["content"]

    def collect(self, stream: bytes) -> Any:
        content: list[Json] = []
        inputs: dict[int, str] = {}
        for event in sse(stream):
            if event["type"] == "content_block_start":
                assert event["index"] == len(content)
                content.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                kind, delta, at = event["delta"].pop("type"), event["delta"], event["index"]
                if kind == "input_json_delta":
                    inputs[at] = inputs.get(at, "") + delta["partial_json"]
                    continue
                for field, text in delta.items():
                    content[at][field] += text
        for at, text in inputs.items():
            content[at]["input"] = json.loads(text)
        return content

    def echo(self, answer: Any, rewrite: str) -> Json:
        if rewrite == "cached" and answer:
            answer[-1]["cache_control"] = {"type": "ephemeral"}
        if rewrite == "string" and len(answer) == 1 and answer[0]["type"] == "text":
            answer = answer[0]["text"]
        user = {"role": "user", "content": "Go on."}
        return {"messages": [user, {"role": "assistant", "content": answer}, user]}

    def reason(self, reply: Json) -> str:
        return str(reply["stop_reason"])


class _GoogleWire(TalkWire):
    """Google's generateContent."""

    dialect = Google()
    path = "/models/m:streamGenerateContent"
    rewrites = ("verbatim", "dropped", "new ids", "no ids")
    tools = [
        {
            "functionDeclarations": [
                {"name": "read", "description": "Read", "parametersJsonSchema": {"type": "object"}}
            ]
        }
    ]

    def write(self, messages: Sequence[Message]) -> Json:
        """Results of tools name their function."""
        body: Json = {"contents": []}
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        for message in messages:
            if message.role is Role.SYSTEM:
                body["systemInstruction"] = {"parts": [{"text": message.content}]}
                continue
            parts: list[Json] = []
            if message.reasoning:
                parts.append({"text": message.reasoning, "thought": True})
            if message.content and message.role is not Role.TOOL:
                parts.append({"text": message.content})
            for image in message.images:
                data = image.url.removeprefix("data:image/png;base64,")
                parts.append({"inlineData": {"mimeType": "image/png", "data": data}})
            for call in message.tool_calls:
                args = json.loads(call.arguments)
                parts.append({"functionCall": {"id": call.id, "name": call.name, "args": args}})
            if message.role is Role.TOOL:
                name = names[str(message.tool_call_id)]
                response = {"output": message.content}
                given = {"id": message.tool_call_id, "name": name, "response": response}
                parts = [{"functionResponse": {**given, "parts": parts}}]
            role = "model" if message.role is Role.ASSISTANT else "user"
            body["contents"].append({"role": role, "parts": parts})
        return body

    def answer(self, reply: Json) -> Any:
        return reply["candidates"][0]["content"]["parts"]

    def collect(self, stream: bytes) -> Any:
        """Adjacent texts joined; without the empty one of the last chunk."""
        parts: list[Json] = []
        for chunk in sse(stream):
            for part in chunk["candidates"][0]["content"]["parts"]:
                last = parts[-1] if parts else {}
                if "text" in part and "text" in last and last.keys() == part.keys():
                    last["text"] += part["text"]
                elif part != {"text": ""}:
                    parts.append(part)
        return parts

    def echo(self, answer: Any, rewrite: str) -> Json:
        parts = [one for one in answer if rewrite != "dropped" or not one.get("thought")]
        for index, part in enumerate(parts):
            if rewrite in {"new ids", "no ids"} and "functionCall" in part:
                new = f"{part['functionCall']['name']}_17_{index}"
                part["functionCall"]["id"] = new if rewrite == "new ids" else None
        user = {"role": "user", "parts": [{"text": "Go on."}]}
        return {"contents": [user, {"role": "model", "parts": parts}, user]}

    def reason(self, reply: Json) -> str:
        return str(reply["candidates"][0]["finishReason"])


class _ChatWire(TalkWire):
    """OpenAI Chat Completions."""

    dialect = OpenAIChat()
    path = "/chat/completions"
    calls = READ | PATCH
    rewrites = ("verbatim", "compact", "dropped", "renamed")
    tools = [
        {
            "type": "function",
            "function": {"name": "read", "description": "Read", "parameters": {"type": "object"}},
        },
        {"type": "custom", "custom": {"name": "patch", "description": "Mend"}},
    ]
    fields = {"model": "m"}

    def write(self, messages: Sequence[Message]) -> Json:
        """Content with an image is a list of parts."""
        return {"messages": [serialize_message(message) for message in messages]}

    def answer(self, reply: Json) -> Any:
        message = reply["choices"][0]["message"]
        assert message.pop("refusal") is None
        return {**message, "content": message["content"] or ""}

    def collect(self, stream: bytes) -> Any:
        answer: Json = {"role": "assistant", "content": ""}
        for event in sse(stream):
            for choice in event["choices"]:
                for field in ("content", "reasoning_content"):
                    if field in choice["delta"]:
                        answer[field] = answer.get(field, "") + choice["delta"][field]
                for part in choice["delta"].get("tool_calls", []):
                    _add_call(answer.setdefault("tool_calls", []), part)
        return answer

    def echo(self, answer: Any, rewrite: str) -> Json:
        if rewrite == "compact":
            for call in answer.get("tool_calls", ()):
                if call["type"] == "function":
                    call["function"]["arguments"] = compact(call["function"]["arguments"])
        elif rewrite == "dropped":
            answer.pop("reasoning_content", None)
        elif rewrite == "renamed" and "reasoning_content" in answer:
            answer["reasoning"] = answer.pop("reasoning_content")
        user = {"role": "user", "content": "Go on."}
        return {"messages": [user, answer, user]}

    def reason(self, reply: Json) -> str:
        return str(reply["choices"][0]["finish_reason"])


def _add_call(calls: list[Json], part: Json) -> None:
    index = part.pop("index")
    if index == len(calls):
        calls.append(part)
        return
    kind = calls[index]["type"]
    field = "input" if kind == "custom" else "arguments"
    calls[index][kind][field] += part[kind][field]


class _ResponsesWire(TalkWire):
    """OpenAI Responses."""

    dialect = OpenAIResponses()
    path = "/responses"
    calls = READ | PATCH | SHELL | AGENTS
    rewrites = ("verbatim", "bare", "compact", "sealed", "dropped")
    tools = [
        {
            "type": "function",
            "name": "read",
            "description": "Read",
            "parameters": {"type": "object"},
        },
        {"type": "custom", "name": "patch", "description": "Mend", "format": {"type": "text"}},
        {"type": "local_shell"},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Helpers.",
            "tools": [{"type": "function", "name": "spawn", "description": "Start one"}],
        },
    ]
    fields = {"model": "m"}
    more = {"include": ["reasoning.encrypted_content"]}

    def write(self, messages: Sequence[Message]) -> Json:
        """One item for each part of a turn."""
        items: list[Json] = []
        for message in messages:
            content: list[Json] = []
            kind = "output_text" if message.role is Role.ASSISTANT else "input_text"
            if message.content:
                content.append({"type": kind, "text": message.content})
            content += [{"type": "input_image", "image_url": one.url} for one in message.images]
            if message.role is Role.TOOL:
                call_id = message.tool_call_id
                result = {"type": "function_call_output", "call_id": call_id, "output": content}
                items.append(result)
                continue
            if message.reasoning:
                summary = [{"type": "summary_text", "text": message.reasoning}]
                items.append({"type": "reasoning", "summary": summary})
            if content:
                items.append({"role": message.role.value, "content": content})
            for one in message.tool_calls:
                call = {"call_id": one.id, "name": one.name, "arguments": one.arguments}
                items.append({"type": "function_call", **call})
        return {"input": items}

    def answer(self, reply: Json) -> Any:
        return reply["output"]

    def collect(self, stream: bytes) -> Any:
        events = sse(stream)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for event in events[2:-1]:
            about = event.get("item_id") or event["item"]["id"]
            assert about == done[event["output_index"]]["id"]
        return done

    def echo(self, answer: Any, rewrite: str) -> Json:
        items = [self._rewrite(item, rewrite) for item in answer]
        if rewrite == "dropped":
            items = [item for item in items if item["type"] != "reasoning"]
        user = {"role": "user", "content": "Go on."}
        return {"input": [user, *items, user]}

    def _rewrite(self, item: Json, rewrite: str) -> Json:
        if rewrite == "bare":
            return {name: value for name, value in item.items() if name not in {"id", "status"}}
        if rewrite == "sealed" and item["type"] == "reasoning":
            return {**item, "summary": []}
        if rewrite == "compact" and item["type"] == "function_call":
            return {**item, "arguments": compact(item["arguments"])}
        return item

    def reason(self, reply: Json) -> str:
        return str(reply["status"])


class _CompletionsWire(Wire):
    """OpenAI text completions: a prompt and an answer of text."""

    dialect = OpenAICompletions()
    path = "/completions"
    fields = {"model": "m"}

    def write(self, messages: Sequence[Message]) -> Json:
        """The texts of all messages, joined to one text."""
        return {"prompt": "".join(message.content for message in messages)}


ANTHROPIC, GOOGLE, CHAT, RESPONSES = _AnthropicWire(), _GoogleWire(), _ChatWire(), _ResponsesWire()
COMPLETIONS = _CompletionsWire()
WIRES: dict[str, TalkWire] = {
    "anthropic": ANTHROPIC,
    "google": GOOGLE,
    "openai_chat": CHAT,
    "openai_responses": RESPONSES,
}
"""The dialects of conversations."""
ALL_WIRES: dict[str, Wire] = {**WIRES, "openai_completions": COMPLETIONS}
