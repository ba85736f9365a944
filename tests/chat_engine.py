"""An engine with vLLM's chat route, which renders prompts itself, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
from renderers import Qwen3RendererConfig, create_renderer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tugline.chat.tokenizer import Tokenizer
from tugline.inference.base import GenerateRequest, SampledChunk, join
from tugline.inference.server import create_app
from tugline.testing import ScriptedEngine


def create_chat_app(engine: ScriptedEngine, tokenizer: Tokenizer) -> Starlette:
    """The scripted engine's app with ``/v1/chat/completions``; a stream has one event."""
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    stops = tuple(renderer.get_stop_token_ids())

    async def complete_chat(request: Request) -> Response:
        body = await request.json()
        tools = [tool["function"] for tool in body.get("tools") or ()] or None
        prompt = renderer.render_ids(body["messages"], tools=tools, add_generation_prompt=True)
        ids = np.array(prompt, np.int32)
        limit = body.get("max_tokens") or engine.max_model_len
        generation = GenerateRequest(prompt_ids=ids, max_tokens=limit, stop_ids=stops)
        answer = join([chunk async for chunk in engine.generate(generation)])
        message = parse(answer, tools)
        field = "delta" if body["stream"] else "message"
        choices = [choice(answer) | {field: message}]
        reply = {"id": "1", "model": body["model"], "prompt_token_ids": prompt, "choices": choices}
        if not body["stream"]:
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


def choice(answer: SampledChunk) -> dict[str, Any]:
    """The only choice of a reply, with ids and log probabilities."""
    logprobs = [{"token": "", "logprob": value} for value in answer.logprobs.tolist()]
    return {
        "index": 0,
        "finish_reason": answer.finish,
        "stop_reason": answer.stop_id,
        "token_ids": answer.ids.tolist(),
        "logprobs": {"content": logprobs},
    }
