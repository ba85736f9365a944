"""The parts of Google's contents, read and written.

A neutral message is split into parts and found again in them: thoughts, text, function calls one
way; text, pictures and function responses, in the order given, the other way.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from tugline.chat.dialects.reading import Prose, need
from tugline.errors import RequestError
from tugline.types import Message, Role, ToolCall

_ASIDE = {"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"}
"""What may stand beside a part's one content."""
_OUTPUT = ("output", "result")
_UNPARSED = "__unparsedArguments"
"""Where arguments stand that are no JSON object, which ``args`` must be; used both ways."""


def camel(item: Mapping[str, Any]) -> dict[str, Any]:
    """The same object with its own field names in camel case; values are left alone."""
    if not any("_" in name for name in item):
        return dict(item)
    named = {}
    for name, value in item.items():
        first, *rest = name.split("_")
        named[first + "".join(word.capitalize() for word in rest)] = value
    return named


# --------------------------------------------------------------------------- written
def answer_parts(message: Message, *, thoughts: bool) -> list[dict[str, Any]]:
    """The parts of one answer: thoughts where they are wanted, text, function calls."""
    parts: list[dict[str, Any]] = []
    if message.reasoning and thoughts:
        parts.append({"text": message.reasoning, "thought": True})
    if message.content:
        parts.append({"text": message.content})
    return parts + [call_part(call, first=i == 0) for i, call in enumerate(message.tool_calls)]


def call_part(call: ToolCall, *, first: bool) -> dict[str, Any]:
    """A function call; the first one of an answer carries a signature, as in the original."""
    args = _object(call.arguments)
    part: dict[str, Any] = {"functionCall": {"id": call.id, "name": call.name, "args": Raw(args)}}
    if first:
        digest = hashlib.blake2b(call.name.encode() + args, digest_size=24).digest()
        part["thoughtSignature"] = base64.b64encode(digest).decode()
    return part


def _object(arguments: str) -> bytes:
    text = arguments.strip() or "{}"
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return text.encode()
    except (ValueError, RecursionError):
        pass
    return msgspec.json.encode({_UNPARSED: arguments})


# --------------------------------------------------------------------------- read
def step(messages: list[Message], item: Any, index: int) -> None:
    """Fold ``[systemInstruction, *contents]`` into neutral messages; see `ParseCache.fold`."""
    if index == 0:
        text = "" if item is None else _instructions(item)
        messages.extend([Message(Role.SYSTEM, text)] if text else [])
        return
    where = f"contents[{index - 1}]"
    role = item.get("role") or "user" if isinstance(item, dict) else None
    if role not in ("user", "model", "function"):  # it may be a list, which has no hash
        msg = f"{where}.role={role!r} must be user, model or function"
        raise RequestError(msg, param=f"{where}.role")
    parts = [
        _kind(part, f"{where}.parts[{i}]")
        for i, part in enumerate(need(item, "parts", list, where))
    ]
    if role == "model":
        _model(messages, parts, index)
    else:
        _user(messages, parts)


_Part = tuple[str, dict[str, Any], str]
"""The field that holds a part's content, the part, and where it stands."""


def _parts(item: Any, where: str) -> list[_Part]:
    """The parts of a content; one alone may stand without a list around it."""
    alone = isinstance(item, dict) and isinstance(item.get("parts"), dict)
    given = [item["parts"]] if alone else need(item, "parts", list, where)
    return [_kind(part, f"{where}.parts[{i}]") for i, part in enumerate(given)]


def _kind(part: Any, where: str) -> _Part:
    if not isinstance(part, dict):
        msg = f"{where}={part!r:.60} must be an object"
        raise RequestError(msg, param=where)
    named = camel(part)
    kinds = [name for name, value in named.items() if name not in _ASIDE and value is not None]
    if len(kinds) > 1:
        msg = f"{where} must hold one of {', '.join(sorted(kinds))}, not all"
        raise RequestError(msg, param=where)
    if not kinds:  # a bare signature, as Gemini itself sends at the end of a stream
        return "text", {**named, "text": ""}, where
    return kinds[0], named, where


def _instructions(item: Any) -> str:
    """A system prompt: text, one part, or a content whose parts are text."""
    if isinstance(item, str):
        return item
    prose = Prose()
    part = isinstance(item, dict) and "text" in item
    for kind, named, place in _parts({"parts": item} if part else item, "systemInstruction"):
        if kind != "text":
            raise _unknown(kind, place, "only text stands in a system prompt")
        prose.add(need(named, "text", str, place))
    return prose.text


def _user(messages: list[Message], parts: Sequence[_Part]) -> None:
    """Append function responses and what stands between them, in the order given."""
    prose = Prose()
    for kind, part, where in parts:
        if kind == "functionResponse":
            if not prose.empty:
                messages.append(Message(Role.USER, prose.text, images=tuple(prose.images)))
                prose = Prose()
            messages.append(_result(messages, part[kind], f"{where}.{kind}"))
        else:
            _read(prose, kind, part, where)
    if not prose.empty or not parts:
        messages.append(Message(Role.USER, prose.text, images=tuple(prose.images)))


def _read(prose: Prose, kind: str, part: dict[str, Any], where: str) -> None:
    if kind == "text":
        prose.add(need(part, "text", str, where))
        return
    if kind not in {"inlineData", "fileData"}:
        raise _unknown(kind, where, "a user's parts are text, images or functionResponse")
    held = camel(need(part, kind, dict, where))
    media = str(held.get("mimeType") or "")
    where = f"{where}.{kind}"
    if not media.startswith("image/") and not (media == "" and kind == "fileData"):
        msg = f"{where}.mimeType={media!r} cannot be honoured; only images are understood"
        raise RequestError(msg, param=f"{where}.mimeType")
    if kind == "inlineData":
        prose.picture(f"data:{media};base64,{need(held, 'data', str, where)}")
        return
    uri = need(held, "fileUri", str, where)
    if not uri.startswith(("https://", "http://")):
        msg = f"{where}.fileUri={uri!r:.60} must be an https address; uploaded files are not kept"
        raise RequestError(msg, param=f"{where}.fileUri")
    prose.picture(uri)


def _result(messages: Sequence[Message], value: Any, where: str) -> Message:
    name = need(value, "name", str, where)
    response = value.get("response")
    text, failed = _told(need(value, "response", dict, where) if response is not None else {})
    prose = Prose()
    prose.add(text)
    for kind, part, place in _parts(value, where) if value.get("parts") is not None else ():
        _read(prose, kind, part, place)
    return Message(
        Role.TOOL,
        prose.text,
        tool_call_id=_answered(messages, value.get("id"), name, where),
        images=tuple(prose.images),
        failed=failed,
    )


def _told(response: dict[str, Any]) -> tuple[str, bool]:
    """What a function gave back as text, and whether that is an error."""
    failed = "error" in response and response["error"] is not None
    if len(response) == 1:
        field, value = next(iter(response.items()))
        if isinstance(value, str) and field in {*_OUTPUT, "error"}:
            return value, failed
    return msgspec.json.encode(response).decode(), failed


def _answered(messages: Sequence[Message], given: Any, name: str, where: str) -> str:
    """The id of the call that a response answers: its own, else the next of that name."""
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
    msg = f"{where} (name={name!r}, id={given!r}) answers no functionCall of the last model content"
    raise RequestError(msg, param=where)


def _model(messages: list[Message], parts: Sequence[_Part], index: int) -> None:
    """Append an answer; successive model contents are one."""
    before = messages.pop() if messages and messages[-1].role is Role.ASSISTANT else None
    text = [before.content] if before else []
    thoughts = [before.reasoning or ""] if before else []
    calls = list(before.tool_calls) if before else []
    for kind, part, where in parts:
        if kind == "text":
            (thoughts if part.get("thought") else text).append(need(part, "text", str, where))
        elif kind == "functionCall":
            held = camel(need(part, kind, dict, where))
            calls.append(_call(held, f"call_{index}_{len(calls)}", f"{where}.{kind}"))
        else:
            raise _unknown(kind, where, "text and functionCall are what was answered here")
    reasoning = "".join(thoughts) or None
    messages.append(Message(Role.ASSISTANT, "".join(text), tuple(calls), reasoning=reasoning))


def _call(held: dict[str, Any], substitute: str, where: str) -> ToolCall:
    given = held.get("id")
    args = need(held, "args", dict, where) if held.get("args") is not None else {}
    raw = args.get(_UNPARSED)
    return ToolCall(
        given if isinstance(given, str) and given else substitute,
        need(held, "name", str, where),
        raw if isinstance(raw, str) else msgspec.json.encode(args).decode(),
    )


def _unknown(kind: str, where: str, right: str) -> RequestError:
    msg = f"{where}.{kind} cannot be honoured; {right}"
    return RequestError(msg, param=f"{where}.{kind}")
