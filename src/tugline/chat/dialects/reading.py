"""How dialects read what a client sent: decoding that says which field is wrong, and prose.

Everything a client can get wrong becomes a `RequestError` that names the field, its value and what
would be right (never a 500), and costs nothing where the request is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tugline.errors import RequestError
from tugline.types import Image

T = TypeVar("T")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_STEPS = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_NAMES = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}


def decode(
    data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], where: str, prefix: str = ""
) -> T:
    """What `data` holds. `where` names the whole; a field is named by `prefix` and its path."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _named(str(error), data, where, prefix) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}"
        raise RequestError(msg) from error


def _named(text: str, data: bytes | msgspec.Raw, where: str, prefix: str) -> RequestError:
    found = _PLACE.search(text)
    if found is None:
        missing = re.search(r"missing required field `(.+)`", text)
        return RequestError(f"{where}: {text}", param=missing[1] if missing else None)
    place, right = prefix + found[1], text[: found.start()]
    value: Any = None
    try:
        value = msgspec.json.decode(data)
        for name, index in _STEPS.findall(found[1]):
            value = value[int(index)] if index else value[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return RequestError(f"{place}: {right}", param=place)
    return RequestError(f"{place}={value!r:.60}: {right}", param=place)


def need(item: Any, field: str, kind: type[T], where: str) -> T:
    """``item[field]``, which must be there and of this kind."""
    found = item.get(field) if isinstance(item, dict) else None
    if isinstance(found, kind) and (not isinstance(found, bool) or kind is bool):
        return found
    place = f"{where}.{field}".lstrip(".") if isinstance(item, dict) else where
    value = found if isinstance(item, dict) else item
    wanted = _NAMES.get(kind, kind.__name__) if isinstance(item, dict) else "an object"
    msg = f"{place}={value!r:.60} must be {wanted}"
    raise RequestError(msg, param=place)


def items(item: Mapping[str, Any], field: str, where: str) -> list[Any]:
    """The list ``item[field]``; an empty one where it is left out."""
    found = item.get(field)
    return [] if found is None else need(item, field, list, where)


def bearer(headers: Mapping[str, str]) -> str | None:
    """The token of an ``Authorization: Bearer`` header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


class Prose:
    """Text parts joined, and the pictures between them.

    A new line parts two texts that have no blank space between them: clients that send one text
    in several parts mean several things.
    """

    def __init__(self) -> None:
        self.text = ""
        self.images: list[Image] = []
        self.empty = True

    def add(self, text: str) -> None:
        """Append one text part."""
        if text and self.text and not (self.text[-1].isspace() or text[0].isspace()):
            self.text += "\n"
        self.text += text
        self.empty = False

    def picture(self, url: str, detail: str | None = None) -> None:
        """Put a picture after the text so far."""
        self.images.append(Image(url, len(self.text), detail))
        self.empty = False
