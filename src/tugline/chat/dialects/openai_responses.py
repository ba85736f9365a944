"""OpenAI Responses, as codex, pi, opencode and mini-swe-agent speak it.

Nothing is stored here: a client sends its whole history, and what would need a store
(`previous_response_id`, `conversation`, `background`, stored prompts) is refused by name. Tools
that run at OpenAI are refused, too, saying what to switch off. `responses_input` folds items into
messages, `responses_output` tells answers as items, `responses_stream` tells them as events.

``/responses/compact`` asks the model for a summary and hands it back sealed; the item is read as
a message of the user later on. ``/responses/input_tokens`` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from tugline.chat.dialects import openai
from tugline.chat.dialects.base import Action, HttpRequest, ParseCache
from tugline.chat.dialects.reading import bearer, decode
from tugline.chat.dialects.responses_input import Folding, declared, read_tools
from tugline.chat.dialects.responses_output import (
    Echo,
    Items,
    compaction,
    echo_of,
    outcome,
    response,
)
from tugline.chat.dialects.responses_stream import ResponseStream
from tugline.chat.request import Request, ThreadInfo
from tugline.chat.response import Response
from tugline.errors import RequestError, TuglineError, Unsupported
from tugline.types import Sampling, TraceKind

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
"""Fields that need a store or change what is sampled, and the values that ask for nothing."""

_SEALED = "reasoning.encrypted_content"
_RENAMED = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
}
_SUMMARISE = (
    "Summarise this conversation for whoever takes it over: the task, what was decided and done, "
    "which files and commands matter, and what remains to be done. Answer with the summary alone."
)
_NULL = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """What is read of a request."""

    input: str | list[msgspec.Raw] = []
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = _NULL
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tool_calls: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    text: msgspec.Raw = _NULL
    include: list[str] | None = None
    reasoning: msgspec.Raw = _NULL
    metadata: msgspec.Raw = _NULL
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    truncation: Any = None
    context_management: Any = None
    top_logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None


class _Text(msgspec.Struct):
    format: openai.Format | None = None


class _Said(msgspec.Struct):
    role: Any = ""
    content: Any = None


_decoder = msgspec.json.Decoder(_Body)
_text = msgspec.json.Decoder(_Text | None)
_said = msgspec.json.Decoder(_Said)
_encode = msgspec.json.Encoder().encode


class OpenAIResponses:
    """``POST /responses``, ``/responses/compact`` and ``/responses/input_tokens``."""

    name = "openai_responses"

    def match(self, incoming: HttpRequest) -> Action | None:
        """See `Dialect.match`."""
        if incoming.method != "POST":
            return None
        if incoming.path in {"/responses", "/responses/compact"}:
            return Action.ANSWER
        return Action.COUNT if incoming.path == "/responses/input_tokens" else None

    def find_secret(self, headers: Mapping[str, str], query: str) -> str | None:
        """The bearer token."""
        return bearer(headers)

    def parse(self, incoming: HttpRequest, cache: ParseCache) -> Request:
        """See `Dialect.parse`."""
        body = decode(incoming.body, _decoder, "the request body")
        openai.refuse(body, _HARMLESS)
        _check_include(body.include or [])
        compact = incoming.path == "/responses/compact"
        items, first = _items(body, compact=compact)
        declared_tools = declared(body.tools, items, incoming.body)
        tools = () if compact else cache.parse_tools(declared_tools, read_tools)
        text = decode(body.text, _text, "text", "text.")
        native = openai.native(incoming.headers)
        if compact:
            native = ThreadInfo(native.id, native.parent, TraceKind.COMPACTION)
        return Request(
            model=body.model,
            messages=cache.fold(items, Folding(items, first)),
            tools=tools,
            sampling=_sampling(body),
            stream=bool(body.stream) and not compact,
            usage_in_stream=True,
            tool_choice=openai.tool_choice(None if compact else body.tool_choice, tools),
            parallel=body.parallel_tool_calls is not False,
            constraint=openai.constraint(text.format if text else None, "text.format"),
            thread=native,
            echo=_echo(body, items[first:-1] if compact else None),
        )

    def encode(self, request: Request, answers: Sequence[Response]) -> bytes:
        """A ``response`` object, or that of a compaction."""
        answer, echo = answers[0], echo_of(request)
        if echo.compact is not None:
            return compaction(answer, echo.compact)
        items = Items(answer.id, request.tools, sealed=echo.sealed)
        return bytes(response(outcome(answer, items.all(answer)), echo.fields))

    def stream(self, request: Request, response_id: str, created: int) -> ResponseStream:
        """Server-sent ``response.*`` events."""
        return ResponseStream(request, response_id, created)

    def encode_count(self, tokens: int) -> bytes:
        """See `Dialect.count`."""
        return _encode({"object": "response.input_tokens", "input_tokens": tokens})

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """See `Dialect.models`."""
        return openai.models(names, window, created)

    def encode_model(self, name: str, window: int, created: int) -> bytes:
        """See `Dialect.model`."""
        return openai.model(name, window, created)

    def encode_error(self, error: TuglineError) -> tuple[int, dict[str, str], bytes]:
        """See `Dialect.error`."""
        return openai.failure(error, _RENAMED)


# --------------------------------------------------------------------------- reading
def _items(body: _Body, *, compact: bool) -> tuple[list[msgspec.Raw], int]:
    """All items as JSON, and which one is ``input[0]``: instructions come before, as an item."""
    asked = [_item("user", body.input)] if isinstance(body.input, str) else body.input
    if not asked:
        msg = "input must be text or a list of at least one item"
        raise RequestError(msg, param="input")
    before = [_item("system", body.instructions)] if body.instructions else []
    after = [_item("user", _SUMMARISE)] if compact else []
    return [*before, *asked, *after], len(before)


def _item(role: str, text: str) -> msgspec.Raw:
    return msgspec.Raw(_encode({"role": role, "content": text}))


def _check_include(include: Sequence[str]) -> None:
    for place, wanted in enumerate(include):
        if "logprobs" in wanted:
            msg = f"include[{place}]={wanted!r} cannot be honoured here; leave it out"
            raise Unsupported(msg, param="include")


def _sampling(body: _Body) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        max_tokens=body.max_output_tokens,
        seed=body.seed,
        stop=openai.stops(body.stop),
    )


def _echo(body: _Body, compacted: Sequence[msgspec.Raw] | None) -> bytes:
    """What the answer repeats; nothing is stored, whatever was asked."""
    if compacted is not None:
        return _encode(Echo(compact=_of_user(compacted)))
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": {} if body.metadata == _NULL else body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": body.reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}} if body.text == _NULL else body.text,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [] if body.tools == _NULL else body.tools,
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    sealed = _SEALED in (body.include or ())
    return _encode(Echo(fields=msgspec.Raw(_encode(fields)), sealed=sealed))


def _of_user(items: Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
    """What the user said, as items in full, which is how a compaction repeats them."""
    kept: list[msgspec.Raw] = []
    for place, said in enumerate(map(_said.decode, items)):
        if said.role == "user":
            parts = said.content
            if isinstance(parts, str):
                parts = [{"type": "input_text", "text": parts}]
            item = {"id": f"msg_kept_{place}", "type": "message", "status": "completed"}
            kept.append(msgspec.Raw(_encode({**item, "role": "user", "content": parts})))
    return kept
