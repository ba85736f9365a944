"""Tool calls as chat templates write them: JSON objects, and DeepSeek V4's DSML."""

# ruff: noqa: RUF001  # the marks as the model writes them
from __future__ import annotations

import json
import re
from typing import Any

import msgspec


# --------------------------------------------------------------------------- JSON
class _JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


_JSON_CALL = msgspec.json.Decoder(_JsonCall)
_LONG_NUMBER = re.compile(r"\d{16}")
"""Digits that the library's parser reads with more precision than msgspec."""


def parse_json_call(text: str) -> tuple[str, str] | None:
    """Parse a block of plain JSON; None leaves it to the library's parser."""
    if _LONG_NUMBER.search(text):
        return None
    try:
        call = _JSON_CALL.decode(text)
    except (ValueError, RecursionError):
        return None
    named = call.name != "" and call.name.isprintable()
    return (call.name, encode_arguments(call.arguments)) if named else None


def encode_arguments(arguments: Any) -> str:
    """Encode arguments as JSON text; text stays as it is."""
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except (ValueError, OverflowError):  # surrogates, and numbers beyond 64 bits
        return json.dumps(arguments)


def decode_arguments(arguments: str) -> Any:
    """Decode arguments; text that is no JSON stays as it is."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments


# --------------------------------------------------------------------------- DSML
_SECTION = re.compile(r"</?｜DSML｜(?:tool_calls|toolcalls|tool)>")
_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]*)">\n(.*?)</｜DSML｜invoke>', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="(.*?)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)

Invocation = tuple[str, dict[str, Any]]
"""Name and arguments."""


def parse_dsml(text: str) -> list[str | Invocation]:
    """Split into calls and the texts around them, in order; a malformed call stays text."""
    parts: list[str | Invocation] = []
    end = 0
    for match in _INVOKE.finditer(text):
        arguments = _parse_parameters(match[2])
        if arguments is not None and match[1] and match[1].isprintable():
            parts += [_SECTION.sub("", text[end : match.start()]), (match[1], arguments)]
            end = match.end()
    parts.append(_SECTION.sub("", text[end:]))
    return [part for part in parts if not isinstance(part, str) or part.strip()]


def _parse_parameters(body: str) -> dict[str, Any] | None:
    """Each parameter once, with nothing but lines between them; a value that is no JSON is text."""
    arguments: dict[str, Any] = {}
    for name, is_text, value in _PARAMETER.findall(body):
        if name in arguments:
            return None
        arguments[name] = value if is_text == "true" else _parse_value(value)
    return arguments if not _PARAMETER.sub("", body).strip("\n") else None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
