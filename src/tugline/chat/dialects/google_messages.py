"""Parse and build Google's contents, tools and tool choice.

A response becomes parts: thoughts, text and function calls. A request's parts become messages:
text, images and function responses, in the given order. Clients may echo calls without ids or with
new ones, so a result is matched to its call by id, else by name and order.

Google's ``Schema`` is a variant of JSON schema (types in capitals, ``nullable``, counts as text).
Templates and grammars need standard JSON schema, so it is converted when parsed.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw

from tugline.chat.dialects import base, decoding
from tugline.chat.model_call import (
    ChoiceMode,
    ContentBuilder,
    Piece,
    ReasoningDelta,
    Request,
    TextDelta,
    ToolChoice,
    add_turn,
    join_pieces,
    split_message,
)
from tugline.errors import RequestError
from tugline.types import Message, Role, Tool, ToolCall

_ASIDE = {"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"}
"""Fields of a part other than its content."""
_OUTPUT = ("output", "result", "error")
_UNPARSED = "__unparsedArguments"
"""Key in ``args`` for arguments that are not a JSON object, used in both directions."""
_MODES = {
    "MODE_UNSPECIFIED": ChoiceMode.AUTO,
    "AUTO": ChoiceMode.AUTO,
    "VALIDATED": ChoiceMode.AUTO,
    "ANY": ChoiceMode.REQUIRED,
    "NONE": ChoiceMode.NONE,
}
_COUNTS = re.compile("(min|max)(Items|Length|Properties)")
_COUNT = re.compile("[0-9]{1,18}")
_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("anyOf", "prefixItems")
_MAPS = ("properties", "defs", "$defs")


def to_camel(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with its field names in camel case; values are unchanged."""
    if not any("_" in name for name in item):
        return dict(item)
    fields = {}
    for name, value in item.items():
        first, *rest = name.split("_")
        fields[first + "".join(word.capitalize() for word in rest)] = value
    return fields


# --------------------------------------------------------------------------- responses
def build_parts(request: Request, message: Message) -> list[dict[str, Any]]:
    """Build the parts of a response: thoughts if requested, text, function calls."""
    pieces = split_message(message, reasoning=request.reasoning)
    return [build_part(piece, signed=piece in message.tool_calls[:1]) for piece in pieces]


def build_part(piece: Piece, *, signed: bool) -> dict[str, Any]:
    """Build a part; the first call of a response has a signature, as in the original."""
    if isinstance(piece, TextDelta):
        return {"text": piece.text}
    if isinstance(piece, ReasoningDelta):
        return {"text": piece.text, "thought": True}
    args = piece.arguments.strip() or "{}"
    if decoding.decode_object(args) is None:
        args = base.encode({_UNPARSED: piece.arguments}).decode()
    call = {"id": piece.id, "name": piece.name, "args": Raw(args.encode())}
    if not signed:
        return {"functionCall": call}
    digest = hashlib.blake2b((piece.name + args).encode(), digest_size=24).digest()
    return {"functionCall": call, "thoughtSignature": base64.b64encode(digest).decode()}


# --------------------------------------------------------------------------- contents
_Part = tuple[str, dict[str, Any], str]
"""Name of the field with a part's content, the part, and its path."""


def fold_content(messages: list[Message], item: Any, index: int) -> None:
    """Fold ``[systemInstruction, *contents]`` into neutral messages; see `ParseCache.fold`."""
    if index == 0:
        text = "" if item is None else _parse_system(item)
        messages.extend([Message(Role.SYSTEM, text)] if text else [])
        return
    where = f"contents[{index - 1}]"
    role = item.get("role") or "user" if isinstance(item, dict) else None
    if role not in ("user", "model", "function"):  # not a set: `role` may be unhashable
        raise decoding.invalid(role, f"{where}.role", "must be user, model or function")
    parts = decoding.parse_list(
        decoding.require(item, "parts", list, where), f"{where}.parts", _parse_part
    )
    if role == "model":
        _add_answer(messages, parts, index)
    else:
        _add_user(messages, parts)


def _parse_parts(item: Any, where: str) -> tuple[_Part, ...]:
    """Parse the parts of a content; a single part may be given without a list."""
    alone = isinstance(item, dict) and isinstance(item.get("parts"), dict)
    parts = [item["parts"]] if alone else decoding.require(item, "parts", list, where)
    return decoding.parse_list(parts, f"{where}.parts", _parse_part)


def _parse_part(part: Any, where: str) -> _Part:
    fields = to_camel(decoding.require_object(part, where))
    kinds = [name for name, value in fields.items() if name not in _ASIDE and value is not None]
    if len(kinds) > 1:
        msg = f"{where} must have exactly one of {', '.join(sorted(kinds))}"
        raise RequestError(msg, param=where)
    if not kinds:  # a bare signature, as Gemini sends at the end of a stream
        return "text", {**fields, "text": ""}, where
    return kinds[0], fields, where


def _parse_system(item: Any) -> str:
    """Parse a system prompt: text, one part, or a content whose parts are text."""
    if isinstance(item, str):
        return item
    builder = ContentBuilder()
    part = isinstance(item, dict) and "text" in item
    for kind, fields, path in _parse_parts({"parts": item} if part else item, "systemInstruction"):
        if kind != "text":
            raise _unknown(kind, path, "a system prompt may hold only text")
        builder.add_text(decoding.require(fields, "text", str, path))
    return builder.text


def _add_user(messages: list[Message], parts: Sequence[_Part]) -> None:
    """Append function responses and the content between them, in the given order."""
    builder = ContentBuilder()
    for kind, part, where in parts:
        if kind == "functionResponse":
            if not builder.empty:
                messages.append(builder.build(Role.USER))
                builder = ContentBuilder()
            messages.append(_parse_result(messages, part[kind], f"{where}.{kind}"))
        else:
            _add_part(builder, kind, part, where)
    if not builder.empty or not parts:
        messages.append(builder.build(Role.USER))


def _add_part(builder: ContentBuilder, kind: str, part: dict[str, Any], where: str) -> None:
    if kind == "text":
        builder.add_text(decoding.require(part, "text", str, where))
        return
    if kind not in {"inlineData", "fileData"}:
        raise _unknown(
            kind, where, "the content of a user consists of text, images and functionResponse"
        )
    data = to_camel(decoding.require(part, kind, dict, where))
    media = str(data.get("mimeType") or "")
    where = f"{where}.{kind}"
    if not media.startswith("image/") and not (media == "" and kind == "fileData"):
        msg = f"{where}.mimeType={media!r} is not supported; only images are"
        raise RequestError(msg, param=f"{where}.mimeType")
    if kind == "inlineData":
        builder.add_image(f"data:{media};base64,{decoding.require(data, 'data', str, where)}")
        return
    uri = decoding.require(data, "fileUri", str, where)
    if not uri.startswith(("https://", "http://")):
        problem = "must be an http:// or https:// URL; uploaded files are not stored here"
        raise decoding.invalid(uri, f"{where}.fileUri", problem)
    builder.add_image(uri)


def _parse_result(messages: Sequence[Message], value: Any, where: str) -> Message:
    name = decoding.require(value, "name", str, where)
    response: dict[str, Any] = decoding.optional(value, "response", {}, where)
    builder = ContentBuilder()
    builder.add_text(_find_output(response))
    for kind, part, path in _parse_parts(value, where) if value.get("parts") is not None else ():
        _add_part(builder, kind, part, path)
    call_id = _find_call(messages, value.get("id"), name, where)
    return builder.build(Role.TOOL, call_id, failed=response.get("error") is not None)


def _find_output(response: dict[str, Any]) -> str:
    """Return a function's output as text: a single text value, or else JSON."""
    if len(response) == 1:
        field, value = next(iter(response.items()))
        if isinstance(value, str) and field in _OUTPUT:
            return value
    return base.encode(response).decode()


def _find_call(messages: Sequence[Message], given: Any, name: str, where: str) -> str:
    """Return the id of the call that a response answers: its own, else the next of that name."""
    taken: set[str | None] = set()
    for message in reversed(messages):
        if message.role is Role.TOOL:
            taken.add(message.tool_call_id)
        elif message.role is Role.ASSISTANT:
            calls = message.tool_calls
            if any(call.id == given for call in calls):
                return str(given)
            for call in calls:
                if call.name == name and call.id not in taken:
                    return call.id
            break
    msg = (
        f"{where} (name={name!r}, id={given!r}) matches no functionCall of the last content of "
        "the model"
    )
    raise RequestError(msg, param=where)


def _add_answer(messages: list[Message], parts: Sequence[_Part], index: int) -> None:
    """Append a model's content; a call without an id gets one from its position in the turn."""
    pieces: list[Piece] = []
    number = len(messages[-1].tool_calls) if messages else 0
    for kind, part, where in parts:
        if kind == "text":
            delta = ReasoningDelta if part.get("thought") else TextDelta
            pieces.append(delta(decoding.require(part, "text", str, where)))
        elif kind == "functionCall":
            fields = to_camel(decoding.require(part, kind, dict, where))
            pieces.append(_parse_call(fields, f"call_{index}_{number}", f"{where}.{kind}"))
            number += 1
        else:
            raise _unknown(kind, where, "the content of a model consists of text and functionCall")
    add_turn(messages, join_pieces(pieces) or Message(Role.ASSISTANT))


def _parse_call(fields: dict[str, Any], substitute: str, where: str) -> ToolCall:
    args: dict[str, Any] = decoding.optional(fields, "args", {}, where)
    return ToolCall(
        decoding.optional_text(fields, "id") or substitute,
        decoding.require(fields, "name", str, where),
        decoding.optional_text(args, _UNPARSED) or base.encode(args).decode(),
    )


def _unknown(kind: str, where: str, advice: str) -> RequestError:
    msg = f"{where}.{kind} is not supported; {advice}"
    return RequestError(msg, param=f"{where}.{kind}")


# --------------------------------------------------------------------------- tools
def parse_tools(item: Any, where: str) -> tuple[Tool, ...]:
    """Parse the functions that an item declares; server-side tools are refused."""
    fields = to_camel(decoding.require_object(item, where))
    for name in sorted(fields):
        if fields[name] is not None and name != "functionDeclarations":
            advice = ": Google's servers run this tool; only functionDeclarations are supported"
            raise decoding.unsupported(fields[name], f"{where}.{name}", advice)
    declared = fields.get("functionDeclarations")
    return decoding.parse_list(declared, f"{where}.functionDeclarations", _parse_tool)


def _parse_tool(item: Any, where: str) -> Tool:
    name = decoding.require(item, "name", str, where)
    fields = to_camel(item)
    schema = fields.get("parametersJsonSchema")
    if schema is not None:
        decoding.require_schema(fields, "parametersJsonSchema", where)
    elif fields.get("parameters") is not None:
        schema = to_json_schema(decoding.require_schema(fields, "parameters", where))
    return Tool(name, decoding.optional_text(fields, "description") or "", schema or {})


def to_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert Google's ``Schema`` to JSON schema."""
    result: dict[str, Any] = {}
    for name, value in schema.items():
        if isinstance(value, dict) and name in _MAPS:
            result[name] = {key: _convert(item) for key, item in value.items()}
        elif name in _SCHEMAS:
            result[name] = _convert(value)
        elif isinstance(value, list) and name in _LISTS:
            result[name] = [_convert(item) for item in value]
        elif name == "type" and isinstance(value, str):
            result[name] = value.lower()
        elif _COUNTS.fullmatch(name) and isinstance(value, str) and _COUNT.fullmatch(value):
            result[name] = int(value)
        elif name != "nullable":
            result[name] = value
    if schema.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result


def _convert(value: Any) -> Any:
    return to_json_schema(value) if isinstance(value, dict) else value


def parse_tool_choice(config: Any) -> ToolChoice:
    """Parse ``toolConfig.functionCallingConfig``; VALIDATED equals AUTO here."""
    where = "toolConfig.functionCallingConfig"
    calling = to_camel(config).get("functionCallingConfig") if isinstance(config, dict) else None
    if calling is None:
        return ToolChoice()
    fields = to_camel(decoding.require_object(calling, where))
    mode = _MODES.get(str(fields.get("mode") or "AUTO").upper())
    if mode is None:
        problem = f"must be one of {', '.join(_MODES)}"
        raise decoding.invalid(fields.get("mode"), f"{where}.mode", problem)
    path = f"{where}.allowedFunctionNames"
    names = decoding.parse_list(fields.get("allowedFunctionNames"), path, lambda name, _: name)
    for name in names:
        if not isinstance(name, str):
            raise RequestError(f"{path} has {name!r:.60}; it must hold names", param=path)
    named = mode is ChoiceMode.REQUIRED and len(names) == 1
    return ToolChoice(ChoiceMode.NAMED if named else mode, names)
