"""Strict decoding of requests: errors that name the field, and parsing that costs what is new.

A field that changes the response and cannot be honoured is refused by name. What a client can get
wrong becomes a `RequestError` with the field, its value and what would be right.
"""

import contextlib
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

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
    for name, harmless in refusals.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            right = " or ".join(msgspec.json.encode(one).decode() for one in harmless)
            raise unsupported(value, name, f"; it must be {right or 'left out'}")


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
_BETWEEN = b", \t\r\n"
"""What stands between the items of a list."""


@dataclass(slots=True, eq=False)
class Items(Sequence[bytes]):
    """The items of one request's conversation as JSON, and the messages that they become.

    It grows in place while requests begin with all of the last one.
    """

    body: bytes = b""
    start: int = 0
    """Where the first item of its list begins."""
    ends: list[int] = field(default_factory=list)
    """Where each item of that list ends, counted from `start`."""
    before: tuple[bytes, ...] = ()
    """Items that come first and are elsewhere in the body, such as a system prompt."""
    messages: list[Message] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """The number of messages after each item."""
    lasts: list[Message | None] = field(default_factory=list)
    """The last message after each item, which a later item may have replaced."""

    def __len__(self) -> int:
        return len(self.before) + len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if index < len(self.before):
            return self.before[index]
        index -= len(self.before)
        start = self.ends[index - 1] if index else 0
        return self.body[self.start + start : self.start + self.ends[index]].lstrip(_BETWEEN)

    def count_shared(self, data: bytes, start: int) -> int:
        """How many leading items of the list are in `data` as well, from `start`, before others."""
        ends, mine = self.ends, memoryview(self.body)[self.start :]
        if ends and data.startswith(mine[: ends[-1]], start):
            count = len(ends)
        else:
            count = bisect_left(ends, True, key=lambda end: not data.startswith(mine[:end], start))
        follows = start + ends[count - 1] if count else 0
        return count if data[follows : follows + 1] == b"," else max(0, count - 1)

    def cut(self, count: int) -> "Items":
        """What begins with the first `count` items of the list; this itself if they are all."""
        if count == len(self.ends):
            return self
        kept = len(self.before) + count
        counts, lasts = self.counts[:kept], self.lasts[:kept]
        messages = self.messages[: counts[-1] if counts else 0]
        return Items(b"", 0, self.ends[:count], self.before, messages, counts, lasts)

    def extend(self, body: bytes, start: int, items: Sequence[msgspec.Raw]) -> None:
        """Add the items that follow in `body`, whose list begins at `start`."""
        self.body, self.start = body, start
        end = start + (self.ends[-1] if self.ends else 0)
        for item in items:
            while body[end] in _BETWEEN:
                end += 1
            end += len(memoryview(item))
            self.ends.append(end - start)

    def fold(
        self, step: Step, before: Sequence[bytes] = (), after: Sequence[bytes] = ()
    ) -> tuple[Message, ...]:
        """The messages of these items, with others `before` and `after` them.

        Those of items that were folded before are the same objects. Raises `RequestError`.
        """
        if self.before != (known := tuple(before)):
            self.before, self.counts, self.lasts = known, [], []
        if (count := len(self) + len(after)) > _MAX_ITEMS:
            raise invalid(count, "messages", f"are too many; the bound is {_MAX_ITEMS}")
        messages, counts, lasts = self.messages, self.counts, self.lasts
        del messages[counts[-1] if counts else 0 :]  # what an item added before it was refused
        if lasts and lasts[-1] is not None:
            messages[-1] = lasts[-1]
        for index in range(len(counts), len(self)):
            step(messages, _decode_item(self[index], index), index)
            counts.append(len(messages))
            lasts.append(messages[-1] if messages else None)
        messages = messages.copy() if after else messages
        for index, item in enumerate(after, len(self)):
            step(messages, _decode_item(item, index), index)
        return tuple(messages)


class ParseCache:
    """Caches the last requests of one session, so that parsing costs what is new in each (I7).

    Several are kept, for agents that take turns. Bodies are compared byte for byte.
    """

    def __init__(self) -> None:
        self._requests: list[Items] = []
        self._nearest: tuple[bytes, int, Items] = b"", 0, Items()
        """The body that is being parsed, the number of items it shares with another, and that."""
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
            self._nearest = data, *self._find_nearest(data)
        _, count, best = self._nearest
        return best.start + best.ends[count - 1] if count else 0

    def decode_body(
        self, data: bytes, decoder: msgspec.json.Decoder[S], name: str
    ) -> tuple[S, Items]:
        """Decode a request whose list `name` is its conversation: only what is new is scanned.

        Returns that list's items too, valid until the next request. Raises `RequestError`.
        """
        known = self.known_bytes(data)
        _, count, best = self._nearest
        self._nearest = b"", 0, Items()
        body, text, start = None, data, best.start
        if count:
            text = data[:start] + data[known + 1 :]
            with contextlib.suppress(ValueError, RecursionError):  # decoded whole, below
                body = decoder.decode(text)
        new = getattr(body, name, None) or [ABSENT]
        if body is None or text[start : offset(new[0], text)].strip():
            body = decode(data, decoder, "the request body")
            new = getattr(body, name)
            if not isinstance(new, list) or not new:
                return body, Items()
            start = offset(new[0], data)
            count, best = self._find_nearest(data, start)
            new = new[count:]
        gone = best if count and best.ends[-1] - best.ends[count - 1] < _NEARBY else None
        made = best.cut(count)
        made.extend(data, start, new)
        others = [one for one in self._requests if one is not gone and one is not made]
        self._requests = [made, *others][:_CACHED]
        return body, made

    def _find_nearest(self, data: bytes, start: int | None = None) -> tuple[int, Items]:
        """The request that shares most items with `data`, and how many.

        The list of `data` begins at `start`; else only requests count that are the same up to it.
        """
        shared = [
            (one.count_shared(data, one.start if start is None else start), one)
            for one in self._requests
            if start is not None or data.startswith(memoryview(one.body)[: one.start])
        ]
        return max(shared, key=itemgetter(0), default=(0, Items()))

    def parse_tools(
        self, raw: bytes, parse: Callable[[Any, str], tuple[Tool, ...]]
    ) -> tuple[Tool, ...]:
        """Parse the tools in `raw` JSON; the same object while the bytes stay the same."""
        return self._parse_tools(bytes(raw), parse)  # a `msgspec.Raw` equals no bytes


def _parse_tools(raw: bytes, parse: Callable[[Any, str], tuple[Tool, ...]]) -> tuple[Tool, ...]:
    groups = parse_list(decode(raw, ANY, "the list of tools"), "tools", parse)
    return tuple(tool for group in groups for tool in group)


def _decode_item(item: bytes, index: int) -> Any:
    return decode(item, ANY, f"message {index} of the request")


def offset(item: msgspec.Raw, text: bytes) -> int:
    """Where in `text` an item begins that was decoded from it, and so is a view of it."""
    item_at, text_at = (
        np.frombuffer(one, np.uint8).__array_interface__["data"][0] for one in (item, text)
    )
    return int(item_at - text_at)
