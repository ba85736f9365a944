"""DeepSeek V4's tool calls: text around one special token, read when the answer is over."""

# ruff: noqa: RUF001  # the marks as the model writes them
from __future__ import annotations

import json
import re
from typing import Any

_SECTION = re.compile(r"</?｜DSML｜(?:tool_calls|toolcalls|tool)>")
_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]*)">\n(.*?)</｜DSML｜invoke>', re.DOTALL)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="(.*?)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)

Invocation = tuple[str, dict[str, Any]]
"""Name and arguments."""


def read(text: str) -> list[str | Invocation]:
    """Calls and the texts around them, in order; a malformed call is text as it was written."""
    parts: list[str | Invocation] = []
    at = 0
    for found in _INVOKE.finditer(text):
        arguments = _arguments(found[2])
        if arguments is not None and found[1] and found[1].isprintable():
            parts += [_SECTION.sub("", text[at : found.start()]), (found[1], arguments)]
            at = found.end()
    parts.append(_SECTION.sub("", text[at:]))
    return [part for part in parts if not isinstance(part, str) or part.strip()]


def _arguments(body: str) -> dict[str, Any] | None:
    """Each parameter once and nothing between them but lines; a value that is no JSON is text."""
    arguments: dict[str, Any] = {}
    for name, is_text, value in _PARAMETER.findall(body):
        if name in arguments:
            return None
        arguments[name] = value if is_text == "true" else _value(value)
    return arguments if not _PARAMETER.sub("", body).strip("\n") else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
