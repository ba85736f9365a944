"""Observed and text mode: the engine renders messages, over ``/v1/chat/completions``.

In observed mode the prompt's ids are the engine's, passed on as it wrote them; nothing is tokenised
again (I1). A reply without ids is an error that names the option to add (I2). Text alone can be run
but not trained on: the ledger counts its tokens as `no_token_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tugline.chat.engines.base import (
    NEUTRAL,
    EngineFormat,
    EngineRequest,
    Feature,
    Post,
    Reader,
)
from tugline.chat.engines.chat_reading import ObservedReader, TextReader
from tugline.chat.engines.generate import build_structured
from tugline.chat.request import ChoiceMode, Constraint, ConstraintKind, ToolChoice
from tugline.chat.serialization import serialize_message, serialize_tool
from tugline.errors import Unsupported
from tugline.types import LogprobMeaning, Mode, Tool

OPENAI_FEATURES = frozenset({Feature.STRUCTURED, Feature.IMAGES, Feature.TOOL_CHOICE})


class ChatFormat(EngineFormat):
    """Observed mode in vLLM's shape: ids and logprobs come with the text, event by event."""

    mode = Mode.OBSERVED
    reasoning_field: str | None = "reasoning"
    """Field for the reasoning of past messages; None leaves it out."""
    advice = "it must know `return_token_ids` (vLLM from 0.10.2 on)"

    def build_request(self, request: EngineRequest) -> Post:
        """Build the conversation and the fields of the server's own."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": request.model,
            "messages": [
                serialize_message(message, reasoning_field=self.reasoning_field)
                for message in request.messages
            ],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "stream": request.stream,
            "stream_options": {"include_usage": True} if request.stream else None,
            **_build_tools(request.tools, request.tool_choice, parallel=request.parallel),
            **self.build_fields(request),
        }
        fields = {name: value for name, value in body.items() if value is not None}
        return Post("/v1/chat/completions", msgspec.json.encode(fields))

    def build_fields(self, request: EngineRequest) -> dict[str, Any]:
        """Build the fields that not every server knows."""
        constraint = request.constraint
        return NEUTRAL | {
            "logprobs": True,
            "return_token_ids": True,
            "request_id": request.request_id,
            "top_k": request.sampling.top_k or 0,
            "structured_outputs": None if constraint is None else build_structured(constraint),
        }

    def make_reader(self, request: EngineRequest) -> Reader:
        """Make a reader."""
        return ObservedReader(f"{self.name} sent text without token ids; {self.advice}")


class ObservedChat(ChatFormat):
    """A server that knows `return_token_ids` but is none of those known by name."""

    name = "openai"
    features = OPENAI_FEATURES
    advice = "run it with format `text`, or find its option for `return_token_ids`"
    default_meaning = LogprobMeaning.RAW


class TextChat(ChatFormat):
    """Text mode: any server that speaks OpenAI's chat; only OpenAI's own fields are sent."""

    name = "openai"
    mode = Mode.TEXT
    features = OPENAI_FEATURES
    reasoning_field = None
    default_meaning = LogprobMeaning.RAW

    def build_fields(self, request: EngineRequest) -> dict[str, Any]:
        """Ask for structured output."""
        return {"response_format": build_response_format(request.constraint)}

    def make_reader(self, request: EngineRequest) -> Reader:
        """Make a reader."""
        return TextReader()


def _build_tools(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> dict[str, Any]:
    """Build the tools that may be called, and whether one must be."""
    if choice.names:
        tools = [tool for tool in tools if tool.name in choice.names]
    if not tools:
        return {}
    fields: dict[str, Any] = {"tools": [serialize_tool(tool) for tool in tools]}
    if choice.mode is ChoiceMode.NAMED and len(tools) == 1:
        fields["tool_choice"] = {"type": "function", "function": {"name": tools[0].name}}
    elif choice.mode is ChoiceMode.NAMED:
        fields["tool_choice"] = ChoiceMode.REQUIRED.value
    elif choice.mode is not ChoiceMode.AUTO:
        fields["tool_choice"] = choice.mode.value
    if not parallel:
        fields["parallel_tool_calls"] = False
    return fields


def build_response_format(constraint: Constraint | None) -> dict[str, Any] | None:
    """Structured output as in the OpenAI API. Raises `Unsupported` for a grammar."""
    if constraint is None:
        return None
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
