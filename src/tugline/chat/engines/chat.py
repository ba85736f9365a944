"""The engine renders: ``/v1/chat/completions`` with the ids that it used read back.

The embedded engine and vLLM serve it alike; other servers change what they must in their own file.
Invariants: I1 (the prompt's ids are the engine's, passed on as it wrote them; nothing is tokenised
again), I2 (an answer without ids is an error that says what to ask for; text alone is counted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tugline.chat.engines.base import EngineRequest, Feature, Post, Reader
from tugline.chat.engines.chat_reading import ChatReader
from tugline.chat.engines.generate import NEUTRAL, parse_engine_error, structured
from tugline.chat.request import ChoiceMode, Constraint, ConstraintKind, ToolChoice
from tugline.errors import TuglineError, Unsupported
from tugline.types import LogprobMeaning, Message, Mode, Role, Sampling, Tool


class Chat:
    """Observed mode in vLLM's shape: ids and logprobs come with the text, event by event."""

    mode = Mode.OBSERVED
    reasoning = "reasoning"
    """Where past thoughts go in a message."""
    advice = "it must know `return_token_ids` (vLLM from 0.10.2 on)"

    def __init__(
        self,
        name: str,
        *,
        logprob_meaning: LogprobMeaning = LogprobMeaning.PROCESSED,
        features: frozenset[Feature] = frozenset(),
    ) -> None:
        self.name = name
        self.logprob_meaning = logprob_meaning
        self.features = features

    def build_request(self, request: EngineRequest) -> Post:
        """The conversation, and what to tell of the tokens."""
        body = chat_body(request, reasoning=self.reasoning)
        body |= {"logprobs": True, "return_token_ids": True, "request_id": request.request_id}
        body |= NEUTRAL | {"top_k": request.sampling.top_k or 0}
        if request.constraint is not None:
            body["structured_outputs"] = structured(request.constraint)
        return Post("/v1/chat/completions", msgspec.json.encode(body))

    def make_reader(self, request: EngineRequest) -> Reader:
        """A fresh reader."""
        return ChatReader(f"{self.name} sent text without token ids; {self.advice}")

    def build_abort(self, request_id: str) -> Post | None:
        """Ends the request; its reply then comes with what was sampled."""
        return Post("/abort_requests", msgspec.json.encode({"request_ids": [request_id]}))

    def parse_error(self, status: int, body: bytes, retry_after: str | None) -> TuglineError:
        """The message inside ``{"error": {...}}``, or the start of whatever came."""
        return parse_engine_error(status, body, retry_after)


# --------------------------------------------------------------------------- asking
def chat_body(request: EngineRequest, *, reasoning: str | None) -> dict[str, Any]:
    """The request as every such server takes it; past thoughts go into the field `reasoning`."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_message(message, reasoning) for message in request.messages],
        **_settings(sampling),
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
        **_tools(request.tools, request.tool_choice, parallel=request.parallel),
    }
    return {name: value for name, value in body.items() if value is not None}


def _settings(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }


def _message(message: Message, reasoning: str | None) -> dict[str, Any]:
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    plain: dict[str, Any] = {"role": role.value, "content": _content(message)}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning and reasoning:
        plain[reasoning] = message.reasoning
    return plain


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Text, or parts of text and images in their order."""
    if not message.images:
        return message.content
    parts: list[dict[str, Any]] = []
    at = 0
    for image in message.images:
        if message.content[at : image.at]:
            parts.append({"type": "text", "text": message.content[at : image.at]})
        url = {"url": image.url} | ({"detail": image.detail} if image.detail else {})
        parts.append({"type": "image_url", "image_url": url})
        at = image.at
    if message.content[at:]:
        parts.append({"type": "text", "text": message.content[at:]})
    return parts


def _tools(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> dict[str, Any]:
    """The tools that may be called, and whether one must be."""
    if choice.names:
        tools = [tool for tool in tools if tool.name in choice.names]
    if not tools:
        return {}
    asked: dict[str, Any] = {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in tools
        ]
    }
    if choice.mode is ChoiceMode.NAMED and len(tools) == 1:
        asked["tool_choice"] = {"type": "function", "function": {"name": tools[0].name}}
    elif choice.mode is ChoiceMode.NAMED:
        asked["tool_choice"] = ChoiceMode.REQUIRED.value
    elif choice.mode is not ChoiceMode.AUTO:
        asked["tool_choice"] = choice.mode.value
    if not parallel:
        asked["parallel_tool_calls"] = False
    return asked


def response_format(constraint: Constraint) -> dict[str, Any]:
    """Structured output as the OpenAI API asks for it. Raises `Unsupported` for a grammar."""
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"type": "json_object"}
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        schema = {
            "name": constraint.name or "answer",
            "schema": msgspec.json.decode(constraint.schema),
        }
        return {"type": "json_schema", "json_schema": schema}
    msg = f"this engine cannot hold an answer to a {constraint.kind}; json_schema it can"
    raise Unsupported(msg)
