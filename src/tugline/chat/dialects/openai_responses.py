"""OpenAI Responses, as used by codex, pi, opencode and mini-swe-agent.

A session stores its own responses, unless the client sends ``store: false``:
`previous_response_id` continues a response, and an item reference stands for the response that
contains the item. Fields that need any other store (`conversation`, `background`, stored prompts)
are refused by name. Tools that run at OpenAI are refused with advice on how to disable them.
`responses_input` parses items, `responses_output` builds items and events.

``/responses/compact`` asks the model for a summary and returns it sealed; in later requests the
item is parsed as a user message. ``/responses/input_tokens`` counts tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from tugline.chat.dialects import base, decoding, openai
from tugline.chat.dialects.responses_input import ItemFolder, list_tools, parse_tools
from tugline.chat.dialects.responses_output import (
    Echo,
    ResponsesRequest,
    ResponseStream,
    build_compaction,
)
from tugline.chat.model_call import Request, Response, ThreadInfo
from tugline.errors import RequestError
from tugline.types import TraceKind
from tugline.types.task import MaxTokens

_REFUSALS: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    **openai.REFUSALS,
}
"""Fields that need a store or change the response, and their harmless values."""

_SEALED = "reasoning.encrypted_content"
_SUMMARISE = (
    "Summarise this conversation for whoever takes it over: the task, what was decided and done, "
    "which files and commands matter, and what remains to be done. Answer with the summary alone."
)


class _EchoedFields(openai.CommonFields, kw_only=True):
    """Fields that a response repeats unchanged, like ``temperature`` and ``top_p``."""

    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Raw = decoding.ABSENT
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


class _ResponsesBody(_EchoedFields, kw_only=True):
    input: str | list[Raw] = msgspec.field(default_factory=list)
    store: bool | None = None
    tools: Raw = decoding.ABSENT
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stop: decoding.StopText | decoding.Stops | None = None
    text: Raw = decoding.ABSENT
    include: list[str] | None = None
    metadata: Raw = decoding.ABSENT


_ECHOED = ("temperature", "top_p", *_EchoedFields.__annotations__)


class _TextConfig(msgspec.Struct):
    format: openai.ResponseFormat | None = None


class _Message(msgspec.Struct):
    role: Any = ""
    content: Any = None


_decoder = decoding.decoder_with_refusals(_ResponsesBody, _REFUSALS)
_text = msgspec.json.Decoder(_TextConfig | None)
_message = msgspec.json.Decoder(_Message)


class OpenAIResponses(openai.OpenAIDialect):
    """``POST /responses``, ``/responses/compact`` and ``/responses/input_tokens``."""

    name = "openai_responses"
    stream_type = ResponseStream
    posts: ClassVar = {
        "/responses": base.Action.ANSWER,
        "/responses/compact": base.Action.ANSWER,
        "/responses/input_tokens": base.Action.COUNT,
    }
    fields: ClassVar = {
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
    }

    def carries_malformed(self, request: Request) -> bool:
        """Arguments are text in this API."""
        return True

    def parse(self, request: base.HttpRequest, cache: decoding.ParseCache) -> Request:
        """See `Dialect.parse`."""
        body, items = cache.decode_body(request.body, _decoder, "input")
        decoding.check_refusals(body, _REFUSALS)
        for index, name in enumerate(body.include or ()):
            if "logprobs" in name:
                raise decoding.unsupported(
                    name, f"include[{index}]", "; leave it out", param="include"
                )
        compact = request.path == "/responses/compact"
        before, after = _find_surroundings(body, items, compact=compact)
        all_tools = list_tools(body.tools, items, request.body)
        tools = () if compact else cache.parse_tools(all_tools, parse_tools)
        text = decoding.decode(body.text, _text, "text", "text.")
        thread = openai.find_thread(request.headers)
        if compact:
            thread = ThreadInfo(thread.id, thread.parent, TraceKind.COMPACTION)
        first = len(before)
        messages = items.fold(ItemFolder(items, first, cache), before, after)
        if body.previous_response_id is not None:
            stored = cache.recall(body.previous_response_id, "previous_response_id")[0]
            messages = (*messages[:first], *stored, *messages[first:])
        return ResponsesRequest(
            model=body.model,
            messages=messages,
            tools=tools,
            sampling=body.build_sampling(body.max_output_tokens, body.stop),
            stream=bool(body.stream) and not compact,
            tool_choice=openai.parse_tool_choice(None if compact else body.tool_choice, tools),
            parallel=body.parallel_tool_calls is not False,
            constraint=openai.parse_constraint(text.format if text else None, "text.format"),
            thread=thread,
            echo=_build_echo(body, [*items, *after[:-1]][first:] if compact else None),
            stored_from=None if compact or body.store is False else first,
        )

    def keep(self, request: Request, response: Response, cache: decoding.ParseCache) -> None:
        """Keep the conversation, without instructions, unless the client sent ``store: false``."""
        if isinstance(request, ResponsesRequest) and request.stored_from is not None:
            conversation = (*request.messages[request.stored_from :], response.message)
            cache.conversations[response.id] = conversation, request.tools

    def encode(self, request: Request, responses: Sequence[Response]) -> bytes:
        """Encode a ``response`` or a ``response.compaction`` object."""
        response = responses[0]
        if isinstance(request, ResponsesRequest) and request.echo.compact is not None:
            return build_compaction(response, request.echo.compact)
        stream = ResponseStream(self, request, response.id, response.created)
        return stream.build_whole(response)

    def encode_count(self, tokens: int) -> bytes:
        """See `Dialect.encode_count`."""
        return base.encode({"object": "response.input_tokens", "input_tokens": tokens})


def _find_surroundings(
    body: _ResponsesBody, items: decoding.Items, *, compact: bool
) -> tuple[list[bytes], list[bytes]]:
    """Return the items before and after those of the body."""
    before = [_encode_item("system", body.instructions)] if body.instructions else []
    after = [_encode_item("user", body.input)] if isinstance(body.input, str) else []
    if not (items or after):
        raise RequestError("input must be a string or a list of at least one item", param="input")
    return before, [*after, _encode_item("user", _SUMMARISE)] if compact else after


def _encode_item(role: str, text: str) -> bytes:
    return base.encode({"role": role, "content": text})


def _build_echo(body: _ResponsesBody, compacted: Sequence[bytes] | None) -> Echo:
    """Build the part of the request that the response repeats."""
    if compacted is not None:
        return Echo(compact=_find_user_items(compacted))
    fields = {name: getattr(body, name) for name in _ECHOED} | {
        "metadata": {} if body.metadata == decoding.ABSENT else body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "store": body.store is not False,
        "text": {"format": {"type": "text"}} if body.text == decoding.ABSENT else body.text,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [] if body.tools == decoding.ABSENT else body.tools,
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    sealed = _SEALED in (body.include or ())
    return Echo(fields=Raw(base.encode(fields)), sealed=sealed)


def _find_user_items(items: Sequence[bytes]) -> list[Raw]:
    """Return the user's messages as full items, which a compaction repeats."""
    collected: list[Raw] = []
    for index, message in enumerate(map(_message.decode, items)):
        if message.role == "user":
            parts = message.content
            if isinstance(parts, str):
                parts = [{"type": "input_text", "text": parts}]
            item = {"id": f"msg_kept_{index}", "type": "message", "status": "completed"}
            collected.append(Raw(base.encode({**item, "role": "user", "content": parts})))
    return collected
