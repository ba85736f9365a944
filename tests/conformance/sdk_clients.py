"""The four APIs through their official SDKs behind one interface, for shared tests."""

# ruff: noqa: D102 - `Api` documents the methods
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import openai
from google import genai
from google.genai import errors, types
from openai.lib.streaming.chat import ChatCompletionStreamState

READ: Any = {"name": "read", "description": "Read"}
PIXEL = "iVBORw0KGgo="
PICTURE = f"data:image/png;base64,{PIXEL}"


@dataclass(frozen=True)
class Reply:
    """An answer in neutral terms."""

    id: str
    text: str
    reasoning: str
    calls: list[tuple[str, Any]]
    """Name and arguments of each tool call."""
    finish: str
    """``stop``, ``length`` or ``tools``."""
    prompt: int
    sampled: int
    raw: Any
    deltas: int = 0
    """Events with a part of the reasoning, where it was streamed."""

    @property
    def content(self) -> Any:
        """Everything but ids and counts."""
        return self.text, self.reasoning, self.calls, self.finish


class Api(ABC):
    """One API; `options` are tools, system, limit, force, image and what the SDK takes."""

    name: str
    echoes: tuple[str, ...] = ("verbatim",)
    """Ways in which harnesses rewrite the history."""
    error: type[Any]

    @abstractmethod
    def connect(self, url: str, key: str) -> contextlib.AbstractAsyncContextManager[Any]:
        """The SDK's client."""

    @abstractmethod
    async def ask(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        """A whole answer."""

    @abstractmethod
    async def stream(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        """A streamed answer, put together by the SDK."""

    @abstractmethod
    def echo(self, reply: Reply, how: str) -> list[Any]:
        """The history's next items: the answer, and a result for each of its calls."""

    async def count(self, sdk: Any, history: list[Any]) -> int | None:
        """Tokens of a prompt; None where the API has no such route."""
        return None

    async def models(self, sdk: Any) -> tuple[list[str], bool]:
        """Names of the models, and whether the first is the same when retrieved."""
        found = [model async for model in sdk.models.list()]
        return [one.id for one in found], await sdk.models.retrieve(found[0].id) == found[0]

    def start(self, text: str, *, image: bool = False) -> list[Any]:
        """A history of one message."""
        return [{"role": "user", "content": self.parts(text) if image else text}]

    def parts(self, text: str) -> list[Any]:
        """Content with a picture."""
        raise NotImplementedError


class OpenAi(Api):
    """What Chat and Responses share."""

    error = openai.APIStatusError
    names: Mapping[str, str]
    """Of options and of the history, as this API calls them."""

    @abstractmethod
    def declare(self, function: dict[str, Any]) -> dict[str, Any]:
        """A tool, or the choice of one."""

    def fields(self, history: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        """The body of a request."""
        fields = {self.names.get(key, key): value for key, value in options.items()}
        if system := fields.pop("system", ""):
            history = [{"role": "developer", "content": system}, *history]
        if fields.get("tools") is True:
            tool = {**READ, "parameters": {"type": "object"}, "strict": False}
            fields["tools"] = [self.declare(tool)]
        if force := fields.pop("force", ""):
            named = self.declare({"name": "read"})
            fields["tool_choice"] = named if force == "named" else "required"
        return {"model": "m", self.names["history"]: history, **fields}

    def connect(self, url: str, key: str) -> contextlib.AbstractAsyncContextManager[Any]:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


class Chat(OpenAi):
    """OpenAI Chat Completions."""

    name = "chat"
    echoes = ("verbatim", "respaced")
    names: Mapping[str, str] = {"limit": "max_completion_tokens", "history": "messages"}

    def parts(self, text: str) -> list[Any]:
        picture = {"type": "image_url", "image_url": {"url": PICTURE}}
        return [picture, {"type": "text", "text": text}]

    def declare(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": function}

    def _read(self, answer: Any, deltas: int = 0) -> Reply:
        (choice,) = answer.choices
        message = choice.message
        functions = [call.function for call in message.tool_calls or []]
        calls = [(one.name, json.loads(one.arguments)) for one in functions]
        finish = {"tool_calls": "tools"}.get(choice.finish_reason, choice.finish_reason)
        thoughts = getattr(message, "reasoning_content", None) or ""
        usage = answer.usage
        return Reply(
            answer.id, message.content or "", thoughts, calls, finish,
            usage.prompt_tokens, usage.completion_tokens, answer, deltas,
        )  # fmt: skip

    async def ask(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        return self._read(await sdk.chat.completions.create(**self.fields(history, options)))

    async def stream(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        fields = self.fields(history, options)
        state: Any = ChatCompletionStreamState()
        deltas = 0
        async for chunk in await sdk.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        ):
            state.handle_chunk(chunk)
            for choice in chunk.choices:
                deltas += bool(getattr(choice.delta, "reasoning_content", None))
        try:
            answer = state.get_final_completion()
        except openai.LengthFinishReasonError as error:  # the SDK does not parse a cut answer
            answer = error.completion
        return self._read(answer, deltas)

    def echo(self, reply: Reply, how: str) -> list[Any]:
        message = reply.raw.choices[0].message.model_dump(exclude_none=True)
        calls = message.get("tool_calls", ())
        if how == "respaced":
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=1)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "x = 1"} for c in calls]
        return [message, *results]


class Responses(OpenAi):
    """OpenAI Responses."""

    name = "responses"
    echoes = ("verbatim", "without ids", "sealed", "references", "some references", "as text")
    names: Mapping[str, str] = {"limit": "max_output_tokens", "history": "input"}

    def parts(self, text: str) -> list[Any]:
        picture = {"type": "input_image", "image_url": PICTURE}
        return [picture, {"type": "input_text", "text": text}]

    def declare(self, function: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", **function}

    def _read(self, answer: Any, deltas: int = 0) -> Reply:
        thoughts = "".join(i.summary[0].text for i in answer.output if i.type == "reasoning")
        functions = [item for item in answer.output if item.type == "function_call"]
        calls = [(one.name, json.loads(one.arguments)) for one in functions]
        finish = "length" if answer.status == "incomplete" else "tools" if calls else "stop"
        usage = answer.usage
        return Reply(
            answer.id, answer.output_text, thoughts, calls, finish,
            usage.input_tokens, usage.output_tokens, answer, deltas,
        )  # fmt: skip

    async def ask(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        include = ["reasoning.encrypted_content"]
        fields = self.fields(history, options)
        return self._read(await sdk.responses.create(**fields, include=include))

    async def stream(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        async with sdk.responses.stream(**self.fields(history, options)) as stream:
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        deltas = [e for e in events if e.type == "response.reasoning_summary_text.delta"]
        return self._read(events[-1].response, len(deltas))

    def echo(self, reply: Reply, how: str) -> list[Any]:
        items = [item.model_dump(exclude_none=True) for item in reply.raw.output]
        for item in items:
            if how == "without ids":
                del item["id"]
            if how == "sealed" and item["type"] == "reasoning":
                item["summary"] = []
        ids = [item["call_id"] for item in items if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": i, "output": "x = 1"} for i in ids]
        if "references" in how:  # by the AI SDK: all items or, since version 7, all but calls
            items = [
                {name: value for name, value in item.items() if name != "id"}
                if how == "some references" and item["type"] == "function_call"
                else {"type": "item_reference", "id": item["id"]}
                for item in items
            ]
        if how == "as text":  # by pydantic-ai, for a model unknown to it
            items = [
                {"role": "assistant", "content": f"<think>\n{item['summary'][0]['text']}\n</think>"}
                if item["type"] == "reasoning"
                else {name: value for name, value in item.items() if name != "id"}
                for item in items
            ]
        return items + results

    async def count(self, sdk: Any, history: list[Any]) -> int | None:
        return (await sdk.responses.input_tokens.count(model="m", input=history)).input_tokens


class Anthropic(Api):
    """Anthropic Messages, with the cache markers and billing header of Claude Code."""

    name = "anthropic"
    error = anthropic.APIStatusError

    def connect(self, url: str, key: str) -> contextlib.AbstractAsyncContextManager[Any]:
        return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)

    def parts(self, text: str) -> list[Any]:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        return [{"type": "image", "source": source}, {"type": "text", "text": text}]

    def fields(self, history: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        fields = {{"limit": "max_tokens"}.get(key, key): value for key, value in options.items()}
        if system := fields.pop("system", ""):
            billing = f"x-anthropic-billing-header: cc_version={len(history)};"
            fields["system"] = [{"type": "text", "text": text} for text in (billing, system)]
            content = history[-1]["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            marked = {**content[-1], "cache_control": {"type": "ephemeral"}}
            history = [*history[:-1], {**history[-1], "content": [*content[:-1], marked]}]
        if fields.get("tools") is True:
            fields["tools"] = [{**READ, "input_schema": {"type": "object"}}]
        if force := fields.pop("force", ""):
            named = {"type": "tool", "name": "read"}
            fields["tool_choice"] = named if force == "named" else {"type": "any"}
        return {"model": "m", "max_tokens": 2000, "messages": history, **fields}

    def _read(self, answer: Any, deltas: int = 0) -> Reply:
        blocks = answer.content
        text = "".join(block.text for block in blocks if block.type == "text")
        thoughts = "".join(block.thinking for block in blocks if block.type == "thinking")
        calls = [(block.name, block.input) for block in blocks if block.type == "tool_use"]
        finish = {"max_tokens": "length", "tool_use": "tools"}.get(answer.stop_reason, "stop")
        usage = answer.usage
        return Reply(
            answer.id, text, thoughts, calls, finish,
            usage.input_tokens, usage.output_tokens, answer, deltas,
        )  # fmt: skip

    async def ask(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        return self._read(await sdk.messages.create(**self.fields(history, options)))

    async def stream(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        async with sdk.messages.stream(**self.fields(history, options)) as stream:
            start, *events = [event async for event in stream]
            reply = self._read(await stream.get_final_message())
        assert start.message.usage.input_tokens == reply.prompt  # by which Claude Code compacts
        return replace(reply, deltas=[event.type for event in events].count("thinking"))

    def echo(self, reply: Reply, how: str) -> list[Any]:
        content = [block.model_dump(exclude_none=True) for block in reply.raw.content]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "x = 1"}
            for block in content
            if block["type"] == "tool_use"
        ]
        return [{"role": "assistant", "content": content}, {"role": "user", "content": results}]

    async def count(self, sdk: Any, history: list[Any]) -> int | None:
        return (await sdk.messages.count_tokens(model="m", messages=history)).input_tokens

    async def models(self, sdk: Any) -> tuple[list[str], bool]:
        names, same = await super().models(sdk)
        assert (await sdk.models.retrieve(names[0])).max_input_tokens == 20_000
        return names, same


class Google(Api):
    """Google's Gemini API, echoed as Gemini CLI does it: without thoughts."""

    name = "google"
    echoes = ("verbatim", "without ids")
    error = errors.APIError

    @contextlib.asynccontextmanager
    async def connect(self, url: str, key: str) -> AsyncIterator[Any]:
        options = types.HttpOptions(base_url=url, timeout=20_000)
        with genai.Client(api_key=key, http_options=options) as both:
            async with both.aio as sdk:
                yield sdk

    def start(self, text: str, *, image: bool = False) -> list[Any]:
        parts = [types.Part(text=text)]
        if image:
            parts.append(types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png"))
        return [types.Content(role="user", parts=parts)]

    def fields(self, history: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        names = {"limit": "max_output_tokens", "system": "system_instruction"}
        config = {names.get(key, key): value for key, value in options.items()}
        if config.get("tools") is True:
            path = types.Schema(type="STRING")
            given = types.Schema(type=types.Type.OBJECT, properties={"path": path})
            tool = types.FunctionDeclaration(name="read", description="Read", parameters=given)
            config["tools"] = [types.Tool(function_declarations=[tool])]
        if force := config.pop("force", ""):
            allowed = ["read"] if force == "named" else None
            calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=allowed)
            config["tool_config"] = types.ToolConfig(function_calling_config=calling)
        config = types.GenerateContentConfig(**config)
        return {"model": "m", "contents": history, "config": config}

    def _read(self, answer: Any, parts: Any, finish: Any, deltas: int = 0) -> Reply:
        text = "".join(part.text for part in parts if part.text and not part.thought)
        thoughts = "".join(part.text for part in parts if part.thought)
        calls = [(p.function_call.name, p.function_call.args) for p in parts if p.function_call]
        signed = [bool(part.thought_signature) for part in parts if part.function_call]
        assert signed == [True, False, False][: len(calls)]
        ends = {types.FinishReason.MAX_TOKENS: "length"}
        usage = answer.usage_metadata
        sampled = (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
        assert usage.total_token_count == usage.prompt_token_count + sampled
        return Reply(
            answer.response_id, text, thoughts, calls,
            ends.get(finish, "tools" if calls else "stop"),
            usage.prompt_token_count, sampled, answer, deltas,
        )  # fmt: skip

    async def ask(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        answer = await sdk.models.generate_content(**self.fields(history, options))
        (candidate,) = answer.candidates
        return self._read(answer, candidate.content.parts, candidate.finish_reason)

    async def stream(self, sdk: Any, history: list[Any], **options: Any) -> Reply:
        stream = await sdk.models.generate_content_stream(**self.fields(history, options))
        chunks = [chunk async for chunk in stream]
        ends = [chunk.candidates[0].finish_reason for chunk in chunks]
        assert not any(ends[:-1])
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts or []]
        deltas = sum(bool(part.thought) for part in parts)
        return self._read(chunks[-1], parts, ends[-1], deltas)

    def echo(self, reply: Reply, how: str) -> list[Any]:
        content = reply.raw.candidates[0].content
        content.parts = [part for part in content.parts if not part.thought]
        results = []
        for call in reply.raw.function_calls or []:
            call.id = None if how == "without ids" else call.id
            result = types.FunctionResponse(id=call.id, name=call.name, response={"output": "x"})
            results.append(types.Part(function_response=result))
        return [content, types.Content(role="user", parts=results)]

    async def count(self, sdk: Any, history: list[Any]) -> int | None:
        return (await sdk.models.count_tokens(model="m", contents=history)).total_tokens

    async def models(self, sdk: Any) -> tuple[list[str], bool]:
        found = [model async for model in await sdk.models.list()]
        assert found[0].input_token_limit == 20_000
        same = await sdk.models.get(model=found[0].name) == found[0]
        return [one.name.removeprefix("models/") for one in found], same


APIS: list[Api] = [Chat(), Responses(), Anthropic(), Google()]
