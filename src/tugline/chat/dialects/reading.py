"""Reading what clients send: decoding and checks whose errors name the field.

Whatever a client can get wrong becomes a `RequestError` that names the field, its value and what
would be right (never a 500). Right requests pay nothing for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from tugline.chat.request import ThreadInfo
from tugline.errors import RequestError, Unsupported
from tugline.types import Image, Message, Role, TraceKind

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
ABSENT = msgspec.Raw(b"null")
"""A field that is left out, or null."""
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_STEPS = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}


# --------------------------------------------------------------------------- refusals
def invalid(value: object, place: str, problem: str) -> RequestError:
    """The error for a value that is wrong; `problem` goes on from ``place=value``."""
    return RequestError(f"{place}={value!r:.60} {problem}", param=place)


def unsupported(value: object, place: str, advice: str, *, param: str | None = None) -> Unsupported:
    """The error for a value that is well-formed and cannot be honoured."""
    msg = f"{place}={value!r:.60} cannot be honoured here{advice}"
    return Unsupported(msg, param=param or place)


def decoder_with_refusals(
    body: type[S], refusals: Mapping[str, tuple[Any, ...]]
) -> msgspec.json.Decoder[S]:
    """A decoder of `body` that also reads the fields that `check_refusals` looks at."""
    fields = [(name, Any, None) for name in refusals]
    return cast(
        "msgspec.json.Decoder[S]",
        msgspec.json.Decoder(msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)),
    )


def check_refusals(body: msgspec.Struct, refusals: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `Unsupported` for a field with a value other than those that change nothing."""
    for field, harmless in refusals.items():
        value = getattr(body, field)
        if value is not None and value not in harmless:
            right = " or ".join(msgspec.json.encode(one).decode() for one in harmless)
            raise unsupported(value, field, f"; it must be {right or 'left out'}")


# --------------------------------------------------------------------------- decoding
def decode(
    data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], where: str, prefix: str = ""
) -> T:
    """Decode `data`. Errors call the whole `where`, and a field by `prefix` and its path."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _name_field(str(error), data, where, prefix) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}"
        raise RequestError(msg) from error


def _name_field(text: str, data: bytes | msgspec.Raw, where: str, prefix: str) -> RequestError:
    match = _PLACE.search(text)
    if match is None:
        missing = re.search(r"missing required field `(.+)`", text)
        return RequestError(f"{where}: {text}", param=missing[1] if missing else None)
    place, problem = prefix + match[1], text[: match.start()]
    value: Any = None
    try:
        value = msgspec.json.decode(data)
        for name, index in _STEPS.findall(match[1]):
            value = value[int(index)] if index else value[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return RequestError(f"{place}: {problem}", param=place)
    return RequestError(f"{place}={value!r:.60}: {problem}", param=place)


def decode_object(text: str) -> dict[str, Any] | None:
    """Decode a JSON object; None for anything else."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def require(item: Any, field: str, kind: type[T], where: str) -> T:
    """``item[field]``, which must be there and of this kind."""
    if not isinstance(item, dict):
        raise invalid(item, where, "must be an object")
    value = item.get(field)
    if isinstance(value, kind) and (not isinstance(value, bool) or kind is bool):
        return value
    place = f"{where}.{field}".lstrip(".")
    raise invalid(value, place, f"must be {_KINDS.get(kind, kind.__name__)}")


def require_object(value: Any, where: str) -> dict[str, Any]:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise invalid(value, where, "must be an object")
    return value


def optional_text(item: Mapping[str, Any], field: str) -> str | None:
    """``item[field]`` if it is text."""
    value = item.get(field)
    return value if isinstance(value, str) else None


def parse_list(value: Any, where: str, parse: Callable[[Any, str], T]) -> tuple[T, ...]:
    """Parse each item of a list; `parse` gets the item and its place."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(value, where, "must be a list")
    return tuple(parse(item, f"{where}[{index}]") for index, item in enumerate(value))


# --------------------------------------------------------------------------- headers
def bearer(headers: Mapping[str, str]) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def session_thread(headers: Mapping[str, str]) -> ThreadInfo:
    """The thread as opencode names it in every dialect."""
    parent = headers.get("x-parent-session-id")
    return ThreadInfo(headers.get("x-session-id"), parent, TraceKind.SUBAGENT if parent else None)


# --------------------------------------------------------------------------- content
class ContentBuilder:
    """Text parts joined, and the images between them.

    A new line separates two texts without white space between them: clients that send one text in
    several parts mean several things.
    """

    def __init__(self) -> None:
        self.text = ""
        self.images: list[Image] = []
        self.empty = True

    def add_text(self, text: str) -> None:
        """Append one text part."""
        if text and self.text and not (self.text[-1].isspace() or text[0].isspace()):
            self.text += "\n"
        self.text += text
        self.empty = False

    def add_image(self, url: str, detail: str | None = None) -> None:
        """Put an image behind the text so far."""
        self.images.append(Image(url, len(self.text), detail))
        self.empty = False

    def build(
        self, role: Role, tool_call_id: str | None = None, *, failed: bool = False
    ) -> Message:
        """Build a message of this content."""
        images = tuple(self.images)
        return Message(role, self.text, tool_call_id=tool_call_id, images=images, failed=failed)


def join_messages(first: Message, second: Message) -> Message:
    """Join successive assistant messages to one turn."""
    return Message(
        Role.ASSISTANT,
        first.content + second.content,
        first.tool_calls + second.tool_calls,
        reasoning=(first.reasoning or "") + (second.reasoning or "") or None,
        images=first.images,
    )
