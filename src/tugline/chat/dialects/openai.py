"""Shared parts of the OpenAI APIs: models, errors, sampling, choices, content, tools, formats.

`custom` tools take free text. The model sees a function with one string argument, ``input``; its
call is encoded as a custom call only if it has that form, else as a function call with the
arguments as written, so that a response survives the round trip unchanged (I1).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw

from tugline.chat.dialects import base, decoding
from tugline.chat.model_call import (
    ChoiceMode,
    Constraint,
    ConstraintKind,
    ContentBuilder,
    Request,
    Response,
    ThreadInfo,
    ToolChoice,
    sum_usage,
)
from tugline.errors import EngineError, RequestError, TuglineError
from tugline.types import Finish, Sampling, Tool, ToolCall, ToolKind, TraceKind
from tugline.types.task import INT32, MaxTokens, MinP, Temperature, TopP
from tugline.web.sse import DONE, encode_event

CUSTOM_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a custom tool as shown to the model."""

_OF_ENGINES = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("chat_template_kwargs", "prompt_logprobs"),
)
REFUSALS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OF_ENGINES, ()),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Fields of the APIs, and of vLLM and SGLang, that change the response, with harmless values, for
`check_refusals`."""

_THREADS = ("session-id", "session_id", "x-session-id", "x-session-affinity")
_PARENTS = ("x-codex-parent-thread-id", "x-parent-session-id")


class OpenAIDialect(base.Dialect):
    """Base of the OpenAI dialects: models and errors."""

    def encode_models(self, names: Sequence[str], window: int, created: int) -> bytes:
        """Encode the body of ``GET /models``."""
        data = [self.build_model(name, window, created) for name in names]
        return base.encode({"object": "list", "data": data})

    def build_model(self, name: str, window: int, created: int) -> dict[str, Any]:
        """Build a ``model`` object."""
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tugline",
            "max_model_len": window,
        }

    def find_status(self, error: TuglineError) -> int:
        """See `Dialect.find_status`; engine faults may be retried, refusals may not."""
        status = super().find_status(error)
        if not isinstance(error, EngineError) or status == 400:
            return status
        if error.status == 429:
            return 429
        return 503 if error.status == 503 or error.retry_after is not None else 502

    def build_error(self, error: TuglineError) -> dict[str, Any]:
        """Build the ``error`` object."""
        kind = code = "server_error"
        if isinstance(error, RequestError):
            kind = "invalid_request_error"
            code = error.code
        elif self.find_status(error) == 429:
            kind = "rate_limit_error"
            code = "rate_limit_exceeded"
        elif self.find_status(error) == 400:
            kind = code = RequestError.code
        param = self.name_field(error)
        return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


# --------------------------------------------------------------------------- requests
class CommonFields(msgspec.Struct, kw_only=True):
    """Request fields that all OpenAI APIs share: the model and sampling parameters."""

    model: str = ""
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    min_p: MinP | None = None
    seed: decoding.Seed | None = None

    def build_sampling(self, max_tokens: int | None, stop: str | list[str] | None) -> Sampling:
        """Build the neutral sampling parameters; empty stop strings are dropped."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            max_tokens=max_tokens,
            seed=decoding.fold_seed(self.seed),
            stop=decoding.build_stops([stop] if isinstance(stop, str) else stop),
        )


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChoiceFields(CommonFields, kw_only=True):
    """Request fields shared by Chat and text completions."""

    stream_options: _StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: MaxTokens | None = None
    stop: decoding.StopText | Annotated[list[decoding.StopText], Meta(max_length=4)] | None = None


def find_thread(headers: Mapping[str, str]) -> ThreadInfo:
    """Return the thread and its parent, from the headers of codex, opencode and pi."""
    metadata = decoding.decode_object(headers.get("x-codex-turn-metadata", "")) or {}
    about = {name: value for name, value in metadata.items() if isinstance(value, str) and value}
    thread = headers.get("thread-id") or about.get("thread_id") or _first(headers, _THREADS)
    parent = about.get("parent_thread_id") or _first(headers, _PARENTS)
    subagent = headers.get("x-openai-subagent") or about.get("subagent_kind")
    kind = None
    if "compact" in f"{subagent} {about.get('request_kind')}":
        kind = TraceKind.COMPACTION
    elif subagent or (parent and parent != thread):
        kind = TraceKind.SUBAGENT
    return ThreadInfo(thread, parent if parent != thread else None, kind)


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((headers[name] for name in names if headers.get(name)), None)


# --------------------------------------------------------------------------- choices
class ChoiceRequest(Request, frozen=True, kw_only=True, gc=False):
    """A request for choices."""

    usage_in_stream: bool = False
    """Whether to stream token counts."""


class ChoiceStream(base.Stream):
    """Encoder of choices as server-sent events; fields shared by all events are encoded once."""

    request: ChoiceRequest

    label: ClassVar[tuple[str, str]]
    """The ``object`` of the events, and the prefix of their id."""

    def __post_init__(self) -> None:
        model = self.request.model
        head = _build_head(self.label, self.response_id, self.created, model)
        self.before = b"data: " + base.encode(head)[:-1] + b',"choices":['
        self.after = b'],"usage":null}\n\n' if self.request.usage_in_stream else b"]}\n\n"
        """`before` and `after` surround a choice in its event."""

    @abstractmethod
    def finish_choice(self, index: int, response: Response) -> bytes:
        """Encode the last event of a choice."""

    def finish(self, responses: Sequence[Response]) -> bytes:
        """See `Stream.finish`."""
        end = b"".join(self.finish_choice(index, last) for index, last in enumerate(responses))
        if self.request.usage_in_stream:
            end += self.before + b'],"usage":' + base.encode(_build_usage(responses))
            end += b"}\n\n"
        return end + encode_event(DONE)

    def fail(self, error: TuglineError) -> bytes:
        """See `Stream.fail`."""
        return encode_event(base.encode(self.dialect.build_error(error)))


def encode_choices(label: tuple[str, str], responses: Sequence[Response], choices: Any) -> bytes:
    """Encode a whole reply; `label` is its ``object`` and the prefix of its id."""
    first = responses[0]
    head = _build_head(label, first.id, first.created, first.model)
    return base.encode({**head, "choices": choices, "usage": _build_usage(responses)})


def _build_head(label: tuple[str, str], name: str, created: int, model: str) -> dict[str, Any]:
    return {"id": f"{label[1]}-{name}", "object": label[0], "created": created, "model": model}


def _build_usage(responses: Sequence[Response]) -> dict[str, Any]:
    total = sum_usage(responses)
    return {
        "prompt_tokens": total.prompt,
        "completion_tokens": total.sampled,
        "total_tokens": total.prompt + total.sampled,
        "prompt_tokens_details": {"cached_tokens": total.reused},
        "completion_tokens_details": {"reasoning_tokens": total.reasoning},
    }


def find_reason(response: Response) -> str:
    """Return the ``finish_reason``."""
    if response.finish is not Finish.STOP:
        return "length"
    return "tool_calls" if response.message.tool_calls else "stop"


# --------------------------------------------------------------------------- content
def parse_content(
    content: Any, where: str, texts: Mapping[str, str], image: str, advice: str
) -> ContentBuilder:
    """Parse text or a list of parts.

    `texts` maps types of text parts to the field of their text, `image` is the type of image
    parts, and `advice` lists the valid types.
    """
    builder = ContentBuilder()
    if isinstance(content, str):
        builder.add_text(content)
        return builder
    if not isinstance(content, list):
        raise decoding.invalid(content, where, "must be text or a list of parts")
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        kind = decoding.require(part, "type", str, path)
        if kind in texts:
            builder.add_text(decoding.require(part, texts[kind], str, path))
        elif kind == image:
            builder.add_image(*_parse_image(part, path))
        else:
            raise decoding.unsupported(kind, f"{path}.type", f"; it must be {advice}")
    return builder


def _parse_image(part: dict[str, Any], where: str) -> tuple[str, str | None]:
    """Return URL and detail, which are fields of the part or of its ``image_url`` object."""
    image = part.get("image_url")
    if image is None:
        raise decoding.invalid(image, f"{where}.image_url", "must be a URL")
    if isinstance(image, str):
        return image, decoding.optional_text(part, "detail")
    url = decoding.require(image, "url", str, f"{where}.image_url")
    return url, decoding.optional_text(image, "detail")


def parse_function(item: Any, where: str) -> Tool:
    """Parse a function declaration of both APIs; `item` holds its name."""
    given = decoding.require_object(item, where).get("parameters")
    parameters = decoding.require_schema(item, "parameters", where) if given else {}
    name = _parse_name(item, where)
    description = decoding.optional(item, "description", "", where)
    return Tool(name, description, parameters, strict=item.get("strict") is True)


def parse_custom(item: Any, where: str) -> Tool:
    """Parse a tool that takes free text; its grammar could not be enforced and is refused."""
    form = item.get("format") or {"type": "text"}
    kind = decoding.require(form, "type", str, f"{where}.format")
    if kind != "text":
        advice = ": grammars of custom tools are not enforced; it must be 'text'"
        raise decoding.unsupported(kind, f"{where}.format.type", advice)
    description = decoding.optional(item, "description", "", where)
    return Tool(_parse_name(item, where), description, CUSTOM_INPUT, ToolKind.CUSTOM)


TOOLS = {"function": parse_function, "custom": parse_custom}
"""Parsers of the tools of both APIs, by type."""


def _parse_name(item: Any, where: str) -> str:
    name = decoding.require(item, "name", str, where)
    if not name:
        raise RequestError(f"{where}.name must not be empty", param=f"{where}.name")
    return name


def parse_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Parse ``tool_choice`` in any form: a mode, one named tool, or a list of allowed tools."""
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        if choice not in {"none", "auto", "required"}:
            problem = "must be none, auto, required or an object"
            raise decoding.invalid(choice, "tool_choice", problem)
        return ToolChoice(ChoiceMode(choice))
    kind = decoding.require(choice, "type", str, "tool_choice")
    if kind == "allowed_tools":
        return _parse_allowed(choice.get("allowed_tools") or choice, tools)
    if kind not in {"function", "custom", "local_shell"}:
        advice = "; it must be function, custom, local_shell or allowed_tools"
        raise decoding.unsupported(kind, "tool_choice.type", advice)
    return ToolChoice(ChoiceMode.NAMED, (_find_name(choice, "tool_choice"),))


def _find_name(item: Any, where: str) -> str:
    kind = decoding.require(item, "type", str, where)
    if kind == "local_shell":
        return kind
    inner = item.get(kind)
    name = decoding.require(inner if isinstance(inner, dict) else item, "name", str, where)
    namespace = item.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) else name


def _parse_allowed(item: Any, tools: Sequence[Tool]) -> ToolChoice:
    mode = decoding.require(item, "mode", str, "tool_choice")
    if mode not in {"auto", "required"}:
        raise decoding.invalid(mode, "tool_choice.mode", "must be auto or required")
    allowed = decoding.require(item, "tools", list, "tool_choice")
    names = tuple(_find_name(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed))
    if {tool.name for tool in tools} <= set(names):
        return ToolChoice(ChoiceMode(mode))
    named = mode == "required" and len(names) == 1
    return ToolChoice(ChoiceMode.NAMED if named else ChoiceMode(mode), names)


class Schema(msgspec.Struct):
    """A named JSON schema."""

    schema: Raw = Raw(b"")
    name: str = ""


class ResponseFormat(Schema):
    """``response_format`` of Chat (the schema nested) or ``text.format`` of Responses (flat)."""

    type: str = "text"
    json_schema: Schema | None = None


def parse_constraint(form: ResponseFormat | None, field: str) -> Constraint | None:
    """Parse the required format of the text; None for any text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if form.type != "json_schema":
        problem = "must be text, json_object or json_schema"
        raise decoding.invalid(form.type, f"{field}.type", problem)
    named = form.json_schema or form
    schema = bytes(named.schema)
    if not schema.startswith(b"{"):
        path = f"{field}.json_schema.schema" if field == "response_format" else f"{field}.schema"
        raise RequestError(f"{path} must be a JSON schema object", param=path)
    return Constraint(ConstraintKind.JSON_SCHEMA, schema.decode(), named.name)


# --------------------------------------------------------------------------- custom calls
def wrap_input(text: str) -> str:
    """Encode free text as the arguments that the model would have written."""
    return base.encode({"input": text}).decode()


def unwrap_input(call: ToolCall) -> str | None:
    """Return the text of a call to a custom tool; None if the arguments have another form."""
    arguments = decoding.decode_object(call.arguments)
    if arguments is None or arguments.keys() != {"input"}:
        return None
    return decoding.optional_text(arguments, "input")
