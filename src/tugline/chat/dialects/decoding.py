"""Strict decoding of requests: errors that name the field, and parsing that costs what is new.

A field that changes the response and cannot be honoured is refused by name. What a client can get
wrong becomes a `RequestError` with the field, its value and what would be right.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar, cast

import msgspec

from tugline.chat.tokens import BodyItems, count_shared, offset
from tugline.errors import RequestError, Unsupported
from tugline.types import Message, Tool

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
ABSENT = msgspec.Raw(b"null")
"""A field that is left out, or null."""
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_NAMED = re.compile(r"(?:required|unknown) field `(.+?)`")
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
    made = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)
    return cast("msgspec.json.Decoder[S]", msgspec.json.Decoder(made))


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
        raise RequestError(f"{where} is not valid JSON: {error}") from error


def _name_field(text: str, data: bytes | msgspec.Raw, where: str, prefix: str) -> RequestError:
    match, named = _PLACE.search(text), _NAMED.search(text)
    if match is None:
        return RequestError(f"{where}: {text}", param=named[1] if named else None)
    place, problem = prefix + match[1], text[: match.start()]
    if named:
        return RequestError(f"{place}: {problem}", param=f"{place}.{named[1]}")
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
    with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        value = msgspec.json.decode(text)
        return value if isinstance(value, dict) else None
    return None


def require(item: Any, field: str, kind: type[T], where: str) -> T:
    """``item[field]``, which must be there and of this kind."""
    value = require_object(item, where).get(field)
    if isinstance(value, kind) and (not isinstance(value, bool) or kind is bool):
        return value
    place = f"{where}.{field}".lstrip(".")
    raise invalid(value, place, f"must be {_KINDS.get(kind, kind.__name__)}")


def optional(item: Mapping[str, Any], field: str, default: T, where: str) -> T:
    """``item[field]``, which must be of the kind of `default`, or that if there is none."""
    return default if item.get(field) is None else require(item, field, type(default), where)


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


# --------------------------------------------------------------------------- incremental parsing
Step = Callable[[list[Message], Any, int], None]
"""Append the messages of one decoded item, or replace the last message that it extends.

It sees only the messages so far, the item and its index, so equal prefixes give equal messages.
"""
_CACHED, _MAX_ITEMS, _NEARBY = 4, 10_000, 32 << 10
ANY = msgspec.json.Decoder()


@dataclass(slots=True, eq=False)
class _Parsed:
    """One parsed request: its items as JSON and, after each item, the state of the messages."""

    items: list[bytes]
    messages: list[Message]
    counts: list[int]
    """The number of messages after each item."""
    lasts: list[Message | None]
    """The last message after each item, which a later item may have replaced."""

    def cut(self, count: int) -> "_Parsed":
        """The state after `count` items; this one itself if they are all, so that it grows."""
        kept, end = self, self.counts[count - 1] if count else 0
        if count < len(self.items):
            kept = _Parsed(
                self.items[:count], self.messages[:end], self.counts[:count], self.lasts[:count]
            )
        del kept.messages[end:]  # what an item added before it was refused
        if count and (last := self.lasts[count - 1]) is not None:
            kept.messages[-1] = last
        return kept


class ParseCache:
    """Caches the last requests of one session, so that parsing costs what is new in each (I7).

    Several are kept, for agents that take turns. Bodies and items are compared byte for byte.
    """

    def __init__(self) -> None:
        self._requests: list[_Parsed] = []
        self._bodies: list[BodyItems] = []
        self._nearest: tuple[bytes, int, int, BodyItems] = b"", 0, 0, BodyItems()
        """The body that is being parsed, the items in common with another, their end, and that."""
        self._parse_tools = lru_cache(_CACHED)(_parse_tools)
        self.conversations: dict[str, tuple[tuple[Message, ...], tuple[Tool, ...]]] = {}
        """Conversations that requests may refer to, by the response they end in; with tools."""

    def recall(self, name: str, place: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """The kept conversation of an id such as ``resp_s1-4``. Raises `RequestError`."""
        kept = self.conversations.get(name.partition("_")[2])
        if kept is None:
            raise invalid(name, place, "is not kept by this session; send the whole conversation")
        return kept

    def known_bytes(self, data: bytes) -> int:
        """How many leading bytes an earlier body has as well, up to the end of an item."""
        if self._nearest[0] is not data:
            shared = [(*known.count_shared(data), known) for known in self._bodies]
            count, end, best = max(shared, key=itemgetter(0), default=(0, 0, BodyItems()))
            self._nearest = data, count, end if count else 0, best
        return self._nearest[2]

    def decode_body(
        self, data: bytes, decoder: msgspec.json.Decoder[S], name: str
    ) -> tuple[S, list[bytes]]:
        """Decode a request whose list `name` is its conversation: only what is new is scanned.

        Returns the items of that list as JSON, until the next request; those that it shares with an
        earlier one are the same objects. Raises `RequestError`.
        """
        self.known_bytes(data)
        _, count, end, best = self._nearest
        self._nearest = b"", 0, 0, BodyItems()
        gone = best if count and best.end - end < _NEARBY else None
        made = best.cut(count, end)
        body, start = None, len(best.front)
        if count:
            text = best.front + data[end + 1 :]
            with contextlib.suppress(ValueError, RecursionError):  # decoded whole, below
                body = decoder.decode(text)
        new = getattr(body, name, None) or [ABSENT]
        if body is None or text[start : offset(new[0], text)].strip():
            body = decode(data, decoder, "the request body")
            new = getattr(body, name)
            if not isinstance(new, list) or not new:
                return body, []
            start = offset(new[0], data)
            made = BodyItems(data[:start], start)
        made.add(new, data)
        self._bodies = [made, *(one for one in self._bodies if one is not gone)][:_CACHED]
        return body, made.items

    def fold(self, items: Sequence[bytes], step: Step) -> tuple[Message, ...]:
        """Fold JSON `items` into messages, beginning where they differ from a known request.

        The messages of the shared prefix are the same objects as before.
        """
        if len(items) > _MAX_ITEMS:
            raise invalid(len(items), "messages", f"are too many; the bound is {_MAX_ITEMS}")
        counts = [(count_shared(known.items, items), known) for known in self._requests]
        shared, best = max(counts, key=itemgetter(0), default=(0, _Parsed([], [], [], [])))
        made = best.cut(shared)
        for index in range(shared, len(items)):
            item = decode(items[index], ANY, f"message {index} of the request")
            step(made.messages, item, index)
            made.items.append(items[index])
            made.counts.append(len(made.messages))
            made.lasts.append(made.messages[-1] if made.messages else None)
        self._requests = [made, *(one for one in self._requests if one is not made)][:_CACHED]
        return tuple(made.messages)

    def parse_tools(
        self, raw: bytes, parse: Callable[[Any, str], tuple[Tool, ...]]
    ) -> tuple[Tool, ...]:
        """Parse the tools in `raw` JSON; the same object while the bytes stay the same."""
        return self._parse_tools(bytes(raw), parse)  # a `msgspec.Raw` equals no bytes


def _parse_tools(raw: bytes, parse: Callable[[Any, str], tuple[Tool, ...]]) -> tuple[Tool, ...]:
    groups = parse_list(decode(raw, ANY, "the list of tools"), "tools", parse)
    return tuple(tool for group in groups for tool in group)
