"""Strict, incremental decoding of requests, with errors that name the field.

A field that changes the response and cannot be honoured is refused by name. A client's mistake
becomes a `RequestError` with the field, its value and valid values. The cost of parsing is
proportional to the new part of a request.
"""

import contextlib
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from tugline.errors import RequestError, Unsupported
from tugline.types import Message, Role, Tool
from tugline.types.task import BIG, MAX_STOP_LENGTH, MAX_STOPS

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
ABSENT = msgspec.Raw(b"null")
"""Value of an absent or null field."""
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_NAMED = re.compile(r"(?:required|unknown) field `(.+?)`")
_STEPS = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}


# --------------------------------------------------------------------------- refusals
def invalid(value: object, path: str, problem: str) -> RequestError:
    """Make the error for an invalid value; its text is ``path=value`` and `problem`."""
    return RequestError(f"{path}={value!r:.60} {problem}", param=path)


def unsupported(value: object, path: str, advice: str, *, param: str | None = None) -> Unsupported:
    """Make the error for a well-formed value that cannot be honoured."""
    msg = f"{path}={value!r:.60} is not supported here{advice}"
    return Unsupported(msg, param=param or path)


def refuse_prefill(messages: Sequence[Message]) -> None:
    """Raise `Unsupported` if the last message is the assistant's, for APIs that continue it."""
    if messages and messages[-1].role is Role.ASSISTANT:
        msg = (
            "the last message is from the assistant, but continuing a message is not supported; "
            "end with a user or tool message"
        )
        raise Unsupported(msg, param="messages")


def decoder_with_refusals(
    body: type[S], refusals: Mapping[str, tuple[Any, ...]]
) -> msgspec.json.Decoder[S]:
    """Make a decoder of `body` that also reads the fields checked by `check_refusals`."""
    fields = [(name, Any, None) for name in refusals]
    extended = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)
    return cast("msgspec.json.Decoder[S]", msgspec.json.Decoder(extended))


def check_refusals(body: msgspec.Struct, refusals: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `Unsupported` for a field whose value is not one of its harmless values."""
    for name, harmless in refusals.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            allowed = " or ".join(msgspec.json.encode(other).decode() for other in harmless)
            raise unsupported(value, name, f"; it must be {allowed or 'left out'}")


# --------------------------------------------------------------------------- decoding
def decode(
    data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], where: str, prefix: str = ""
) -> T:
    """Decode `data`. Errors name the data as `where`, and a field as `prefix` and its path."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _name_field(str(error), data, where, prefix) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from error


def _name_field(text: str, data: bytes | msgspec.Raw, where: str, prefix: str) -> RequestError:
    match = _PATH.search(text)
    named = _NAMED.search(text)
    if match is None:
        return RequestError(f"{where}: {text}", param=named[1] if named else None)
    path = prefix + match[1]
    problem = text[: match.start()]
    if named:
        return RequestError(f"{path}: {problem}", param=f"{path}.{named[1]}")
    value: Any = None
    try:
        value = msgspec.json.decode(data)
        for name, index in _STEPS.findall(match[1]):
            value = value[int(index)] if index else value[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return RequestError(f"{path}: {problem}", param=path)
    return RequestError(f"{path}={value!r:.60}: {problem}", param=path)


def decode_object(text: str) -> dict[str, Any] | None:
    """Decode a JSON object; None for anything else."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        value = msgspec.json.decode(text)
        return value if isinstance(value, dict) else None
    return None


def require(item: Any, field: str, kind: type[T], where: str) -> T:
    """Return ``item[field]``, which must exist and be of this kind."""
    value = require_object(item, where).get(field)
    if isinstance(value, kind) and (not isinstance(value, bool) or kind is bool):
        return value
    path = f"{where}.{field}".lstrip(".")
    raise invalid(value, path, f"must be {_KINDS.get(kind, kind.__name__)}")


def optional(item: Mapping[str, Any], field: str, default: T, where: str) -> T:
    """Return ``item[field]``, which must be of the kind of `default`; `default` if absent."""
    return default if item.get(field) is None else require(item, field, type(default), where)


def require_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise invalid(value, where, "must be an object")
    return value


def optional_text(item: Mapping[str, Any], field: str) -> str | None:
    """Return ``item[field]`` if it is text, else None."""
    value = item.get(field)
    return value if isinstance(value, str) else None


def parse_list(value: Any, where: str, parse: Callable[[Any, str], T]) -> tuple[T, ...]:
    """Parse each item of a list; `parse` gets the item and its path."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(value, where, "must be a list")
    return tuple(parse(item, f"{where}[{index}]") for index, item in enumerate(value))


# --------------------------------------------------------------------------- bounds
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Meta(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
MAX_DEPTH = 100
"""Levels of a tool's schema."""


def fold_seed(seed: int | None) -> int | None:
    """Map a seed to one that every engine takes; equal seeds stay equal."""
    return None if seed is None else seed % (BIG + 1)


def build_stops(stops: Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings without empty ones."""
    return tuple(text for text in stops or () if text)


def require_schema(item: Any, field: str, where: str) -> dict[str, Any]:
    """Return a tool's schema, which must be an object that a recording can hold."""
    schema: dict[str, Any] = require(item, field, dict, where)
    _check_schema(schema, f"{where}.{field}", MAX_DEPTH)
    return schema


def _check_schema(value: Any, where: str, depth: int) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise invalid(value, where, "must be an integer of at most 64 bits")
    if not isinstance(value, dict | list):
        return
    if not depth:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} levels deep", param=where)
    for inner in value.values() if isinstance(value, dict) else value:
        _check_schema(inner, where, depth - 1)


# --------------------------------------------------------------------------- incremental parsing
Step = Callable[[list[Message], Any, int], None]
"""Function that appends the messages of a decoded item, or replaces the last message by its
extension.

Its result depends only on the messages so far, the item and its index, so equal prefixes give equal
messages.
"""
_CACHED = 4
_MAX_ITEMS = 10_000
_NEARBY = 32 << 10
ANY = msgspec.json.Decoder()
_BETWEEN = b", \t\r\n"
"""Bytes that separate the items of a list."""


@dataclass(slots=True, eq=False)
class Items(Sequence[bytes]):
    """Items of a request's conversation as JSON, and the messages made from them.

    Extended in place while each request begins with the whole previous one.
    """

    body: bytes = b""
    start: int = 0
    """Offset of the list's first item in `body`."""
    ends: list[int] = field(default_factory=list)
    """End offset of each item of the list, relative to `start`."""
    before: tuple[bytes, ...] = ()
    """Leading items from elsewhere in the body, such as a system prompt."""
    messages: list[Message] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of messages after each item."""
    lasts: list[Message | None] = field(default_factory=list)
    """Last message after each item, which a later item may have replaced."""

    def __len__(self) -> int:
        return len(self.before) + len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if index < len(self.before):
            return self.before[index]
        index -= len(self.before)
        start = self.ends[index - 1] if index else 0
        return self.body[self.start + start : self.start + self.ends[index]].lstrip(_BETWEEN)

    def count_shared(self, data: bytes, start: int) -> int:
        """Count the leading items that `data` repeats from `start`, followed by another item."""
        ends = self.ends
        mine = memoryview(self.body)[self.start :]
        if ends and data.startswith(mine[: ends[-1]], start):
            count = len(ends)
        else:
            count = bisect_left(ends, True, key=lambda end: not data.startswith(mine[:end], start))
        follows = start + ends[count - 1] if count else 0
        return count if data[follows : follows + 1] == b"," else max(0, count - 1)

    def cut(self, count: int) -> "Items":
        """Return a copy with the first `count` items of the list; `self` if those are all."""
        if count == len(self.ends):
            return self
        total = len(self.before) + count
        counts = self.counts[:total]
        lasts = self.lasts[:total]
        messages = self.messages[: counts[-1] if counts else 0]
        return Items(b"", 0, self.ends[:count], self.before, messages, counts, lasts)

    def extend(self, body: bytes, start: int, items: Sequence[msgspec.Raw]) -> None:
        """Add the items that follow in `body`, whose list begins at `start`."""
        self.body = body
        self.start = start
        end = start + (self.ends[-1] if self.ends else 0)
        for item in items:
            while body[end] in _BETWEEN:
                end += 1
            end += len(memoryview(item))
            self.ends.append(end - start)

    def fold(
        self, step: Step, before: Sequence[bytes] = (), after: Sequence[bytes] = ()
    ) -> tuple[Message, ...]:
        """Convert the items, and others `before` and `after` them, to messages.

        Messages of items folded earlier are the same objects. Raises `RequestError`.
        """
        if self.before != (known := tuple(before)):
            self.before = known
            self.counts = []
            self.lasts = []
        if (count := len(self) + len(after)) > _MAX_ITEMS:
            raise invalid(count, "messages", f"are too many; the limit is {_MAX_ITEMS}")
        messages = self.messages
        counts = self.counts
        lasts = self.lasts
        del messages[counts[-1] if counts else 0 :]  # added by an item that was then refused
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
    """Cache of a session's last requests, so that only the new part of each is parsed (I7).

    Several requests are kept, for agents that alternate. Bodies are compared byte by byte.
    """

    def __init__(self) -> None:
        self._requests: list[Items] = []
        self._nearest: tuple[bytes, int, Items] = b"", 0, Items()
        """The body being parsed, the number of items shared with an earlier one, and its items."""
        self._parse_tools = lru_cache(_CACHED)(_parse_tools)
        self.conversations: dict[str, tuple[tuple[Message, ...], tuple[Tool, ...]]] = {}
        """Conversations and tools that requests may refer to, by the id of the last response."""

    def recall(self, name: str, path: str) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Return the stored conversation of an id such as ``resp_s1-4``. Raises `RequestError`."""
        stored = self.conversations.get(name.partition("_")[2])
        if stored is None:
            raise invalid(
                name, path, "is not a response of this session; send the whole conversation"
            )
        return stored

    def known_bytes(self, data: bytes) -> int:
        """Return the number of leading bytes shared with an earlier body, up to an item's end."""
        if self._nearest[0] is not data:
            self._nearest = data, *self._find_nearest(data)
        _, count, best = self._nearest
        return best.start + best.ends[count - 1] if count else 0

    def release_body(self) -> None:
        """Forget the body being parsed, also where its request was refused before `decode_body`."""
        self._nearest = b"", 0, Items()

    def decode_body(
        self, data: bytes, decoder: msgspec.json.Decoder[S], name: str
    ) -> tuple[S, Items]:
        """Decode a request whose list `name` is its conversation; only the new part is scanned.

        Also returns the list's items, valid until the next request. Raises `RequestError`.
        """
        known = self.known_bytes(data)
        _, count, best = self._nearest
        self.release_body()
        body = None
        text = data
        start = best.start
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
        replaced = best if count and best.ends[-1] - best.ends[count - 1] < _NEARBY else None
        items = best.cut(count)
        items.extend(data, start, new)
        others = [i for i in self._requests if i is not replaced and i is not items]
        self._requests = [items, *others][:_CACHED]
        return body, items

    def _find_nearest(self, data: bytes, start: int | None = None) -> tuple[int, Items]:
        """Return the number of items shared with the most similar request, and its items.

        The list of `data` begins at `start`; if None, only requests with the same bytes before
        their list are compared.
        """
        shared = [
            (known.count_shared(data, known.start if start is None else start), known)
            for known in self._requests
            if start is not None or data.startswith(memoryview(known.body)[: known.start])
        ]
        return max(shared, key=itemgetter(0), default=(0, Items()))

    def parse_tools(
        self, raw: bytes, parse: Callable[[Any, str], tuple[Tool, ...]]
    ) -> tuple[Tool, ...]:
        """Parse the tools in `raw` JSON; equal bytes return the same object."""
        return self._parse_tools(bytes(raw), parse)  # `msgspec.Raw` never equals bytes


def _parse_tools(raw: bytes, parse: Callable[[Any, str], tuple[Tool, ...]]) -> tuple[Tool, ...]:
    groups = parse_list(decode(raw, ANY, "the list of tools"), "tools", parse)
    return tuple(tool for group in groups for tool in group)


def _decode_item(item: bytes, index: int) -> Any:
    return decode(item, ANY, f"message {index} of the request")


def offset(item: msgspec.Raw, text: bytes) -> int:
    """Return the offset in `text` of an item decoded from it, which is a view of it."""
    item_at, text_at = (
        np.frombuffer(data, np.uint8).__array_interface__["data"][0] for data in (item, text)
    )
    return int(item_at - text_at)
