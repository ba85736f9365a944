"""Replies of scripted engines, and a scripted engine with vLLM's chat route."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from renderers import Qwen3RendererConfig, create_renderer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from support.tokenizer import make_rendering
from tugline.chat.engines.base import EngineRequest, Feature, Post
from tugline.chat.engines.generate import Embedded
from tugline.chat.model_call import Constraint
from tugline.chat.tokenizer import Tokenizer
from tugline.inference.base import GenerateRequest, SampledChunk, join
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids

RENDERING = make_rendering()
Play = Callable[[Ids, str], Reply]


def ids(text: str, *, end: bool = True) -> list[int]:
    """An answer's ids; with its end-of-turn id unless it is to be cut for length."""
    return RENDERING.tokenizer.encode(f"{text}<|im_end|>" if end else text)


def reply_with(text: str, **how: Any) -> Play:
    """An engine that always gives this answer, less what the prompt already has of it."""

    def reply(prompt: Ids, _request: str) -> Reply:
        whole = ids(text)
        held = prompt.tolist()
        start = next(n for n in range(len(whole), -1, -1) if held[len(held) - n :] == whole[:n])
        return Reply(whole[start:], **how)

    return reply


def reply_in_turn(*texts: str, **how: Any) -> Play:
    """An engine that gives these answers one after the other, then always the last one."""
    rest = list(texts)

    def reply(prompt: Ids, request: str) -> Reply:
        return reply_with(rest.pop(0) if len(rest) > 1 else rest[0], **how)(prompt, request)

    return reply


def reply_cut_once(text: str, after: int) -> Play:
    """An engine that drops its first connection after this many tokens."""
    times = iter((True,))

    def reply(prompt: Ids, request: str) -> Reply:
        cut = after if next(times, False) else None
        return reply_with(text, cut_after=cut)(prompt, request)

    return reply


class Constrained(Embedded):
    """An engine format with constrained decoding, which keeps the constraints."""

    def __init__(self) -> None:
        super().__init__()
        self.features = frozenset({Feature.STRUCTURED})
        self.asked: list[Constraint | None] = []

    def build_request(self, request: EngineRequest) -> Post:
        """The request without its constraint, which the scripted engine would refuse."""
        self.asked.append(request.request.constraint)
        free = replace(request.request, constraint=None)
        return super().build_request(replace(request, request=free))


class ChatBody(msgspec.Struct):
    """The fields of a request that vLLM checks."""

    model: str
    messages: list[dict[str, Any]]
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    tools: list[dict[str, Any]] | None = None


def create_chat_app(engine: ScriptedEngine, tokenizer: Tokenizer) -> Starlette:
    """The scripted engine's app with ``/v1/chat/completions``; a stream has one event.

    It renders prompts itself. Like vLLM it answers 400 to a field out of its
    bounds, and to messages that it cannot render.
    """
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    stops = tuple(renderer.get_stop_token_ids())

    async def complete_chat(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=ChatBody)
            tools = [tool["function"] for tool in body.tools or ()] or None
            prompt = renderer.render_ids(body.messages, tools=tools, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - whatever the template raises
            return JSONResponse({"error": {"message": str(error), "code": 400}}, 400)
        ids = np.array(prompt, np.int32)
        if len(ids) >= engine.max_model_len:
            message = f"maximum context length is {engine.max_model_len} tokens, not {len(ids)}"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        limit = min(body.max_tokens or engine.max_model_len, engine.max_model_len)
        generation = GenerateRequest(prompt_ids=ids, max_tokens=limit, stop_ids=stops)
        answer = join([chunk async for chunk in engine.generate(generation)])
        message = parse(answer, tools)
        field = "delta" if body.stream else "message"
        choices = [make_choice(answer) | {field: message}]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer.ids)}
        reply = {"id": "1", "model": body.model, "choices": choices, "usage": usage}
        reply["prompt_token_ids"] = prompt
        if not body.stream:
            return JSONResponse(reply)
        events = [b"data: " + msgspec.json.encode(reply) + b"\n\n", b"data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    def parse(answer: SampledChunk, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        parsed = renderer.parse_response(answer.ids.tolist(), tools=tools)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            functions = [
                {"name": call.name, "arguments": json.dumps(call.arguments)}
                for call in parsed.tool_calls
            ]
            message["tool_calls"] = [
                {"index": index, "id": f"call_{index}", "type": "function", "function": function}
                for index, function in enumerate(functions)
            ]
        return message

    own = Route("/v1/chat/completions", complete_chat, methods=["POST"])
    return Starlette(routes=[own, Mount("/", create_app(engine, model_name="scripted"))])


def make_choice(answer: SampledChunk) -> dict[str, Any]:
    """The only choice of a reply, with ids and log probabilities."""
    logprobs = [{"token": "", "logprob": value} for value in answer.logprobs.tolist()]
    return {
        "index": 0,
        "finish_reason": answer.finish,
        "stop_reason": answer.stop_id,
        "token_ids": answer.ids.tolist(),
        "logprobs": {"content": logprobs},
    }
