"""Mask what two runs of the same program may differ in, such as dates, durations and folders.

Both sides are masked before a request is compared with the recording. Values that were masked and
did differ are reported, so no difference is hidden silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import msgspec

from tugline.errors import UsageError
from tugline.gateway.canonical import MessageDigest, call_positions, digest_message
from tugline.types import Message, Tool

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
BUILT_IN: dict[str, str] = {
    "gateway": r"https?://(?:127\.0\.0\.1|localhost):\d+(?:/s/[\w.-]+)?",
    "uuid": r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    "time": r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?)?"
    rf"|\b(?:{_DAY},? )?{_MONTH} {{1,2}}\d{{1,2}}(?:,? \d{{4}}\b| \d\d:\d\d(?::\d\d)?)"
    r"|\b\d\d:\d\d:\d\d\b",
    "duration": r"\b\d+\.\d+ ?(?:ms|s|sec|seconds?)\b",
    "temporary": r"(?<=/)tmp[._-]?\w{6,10}\b",
    "address": r"\b0x[0-9a-f]{6,16}\b",
    "process": r"(?<=PGID: )\d+|(?i:\bpid[=: ] ?)\d+",
    "generated": r"(?<=Chunk ID: )[0-9a-f]+|(?<=\"nickname\":\")[^\"]+",
}
"""Pattern by name."""


def folder_patterns(workdir: str, home: str) -> dict[str, str]:
    """Return patterns of a session's folders, also with dashes for special characters."""
    patterns: dict[str, str] = {}
    parent = str(PurePath(workdir).parent) if workdir and home else ""
    folder = parent if parent == str(PurePath(home).parent) and parent != "/" else ""
    for name, path in (("workdir", workdir), ("home", home), ("folder", folder)):
        if path:
            dashed = re.sub(r"[^A-Za-z0-9]", "-", path)
            patterns[name] = rf"(?:{re.escape(path)}|{re.escape(dashed)})(?!\w)"
    return patterns


class Normalizer:
    """Patterns of one side: its folders first, then custom ones, then the built-in ones."""

    def __init__(self, folders: Mapping[str, str], custom: Sequence[str] = ()) -> None:
        """Raises `UsageError` for a custom pattern that is no regular expression."""
        for pattern in custom:
            try:
                re.compile(pattern)
            except re.error as error:
                msg = f"--mask {pattern!r} is no regular expression: {error}"
                raise UsageError(msg) from error
        numbered = {f"mask{number}": one for number, one in enumerate(custom, start=1)}
        named = {**folders, **numbered, **BUILT_IN}
        self._pattern = re.compile("|".join(f"(?P<{name}>{one})" for name, one in named.items()))
        self._cache: dict[Message, Message] = {}
        self._tools: tuple[Sequence[Tool], dict[str, str]] = ((), {})

    def mask_text(self, text: str) -> str:
        """Replace every match by the name of its pattern."""
        return self._pattern.sub(lambda match: f"<{match.lastgroup}>", text)

    def find_values(self, text: str) -> list[tuple[str, str]]:
        """Return every match in `text` with the name of its pattern."""
        return [(str(match.lastgroup), match[0]) for match in self._pattern.finditer(text)]

    def mask_message(self, message: Message) -> Message:
        """Mask the text and the tool calls of a message."""
        masked = self._cache.get(message)
        if masked is None:
            calls = tuple(
                msgspec.structs.replace(call, arguments=self.mask_text(call.arguments))
                for call in message.tool_calls
            )
            text = self.mask_text(message.content)
            masked = msgspec.structs.replace(message, content=text, tool_calls=calls)
            self._cache[message] = masked
        return masked

    def digest_messages(self, messages: Sequence[Message]) -> tuple[MessageDigest, ...]:
        """Return the digests of masked messages."""
        digests: list[MessageDigest] = []
        positions: dict[str, int] = {}
        for message in messages:
            digests.append(digest_message(self.mask_message(message), positions))
            positions = call_positions(message) if message.tool_calls else positions
        return tuple(digests)

    def mask_tools(self, tools: Sequence[Tool]) -> dict[str, str]:
        """Return each tool's masked declaration by its name; cached while `tools` is the same."""
        if tools is not self._tools[0]:
            masked = {one.name: self.mask_text(msgspec.json.encode(one).decode()) for one in tools}
            self._tools = (tools, masked)
        return self._tools[1]
