"""What two runs of the same program may differ in without having done anything different.

Dates, durations, random names, process numbers and the folders of the session are replaced on both
sides before a request is compared with the recording. What was masked and did differ is told in
the report, so nothing is hidden silently.
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
"""Name to pattern."""


def places(workdir: str, home: str) -> dict[str, str]:
    """The folders of a session as patterns, also with every other sign made a dash."""
    found: dict[str, str] = {}
    around = str(PurePath(workdir).parent) if workdir and home else ""
    folder = around if around == str(PurePath(home).parent) and around != "/" else ""
    for name, path in (("workdir", workdir), ("home", home), ("folder", folder)):
        if path:
            dashed = re.sub(r"[^A-Za-z0-9]", "-", path)
            found[name] = rf"(?:{re.escape(path)}|{re.escape(dashed)})(?!\w)"
    return found


class Normalizers:
    """One side's patterns: those of `places` first, then the built-in ones, then `others`."""

    def __init__(self, places: Mapping[str, str], others: Sequence[str] = ()) -> None:
        """Raises `UsageError` for one of `others` that is no regular expression."""
        for other in others:
            try:
                re.compile(other)
            except re.error as error:
                msg = f"--mask {other!r} is no regular expression: {error}"
                raise UsageError(msg) from error
        own = {f"mask{number}": other for number, other in enumerate(others, start=1)}
        named = {**places, **own, **BUILT_IN}
        self._pattern = re.compile("|".join(f"(?P<{name}>{one})" for name, one in named.items()))
        self._known: dict[Message, Message] = {}
        self._tools: tuple[Sequence[Tool], dict[str, str]] = ((), {})

    def text(self, text: str) -> str:
        """`text` with names in place of what they stand for."""
        return self._pattern.sub(lambda found: f"<{found.lastgroup}>", text)

    def values(self, text: str) -> list[tuple[str, str]]:
        """Every masked place of `text`: the mask's name, and what stands there."""
        return [(str(found.lastgroup), found[0]) for found in self._pattern.finditer(text)]

    def message(self, message: Message) -> Message:
        """`message` with its text and its tool calls masked."""
        known = self._known.get(message)
        if known is None:
            calls = tuple(
                msgspec.structs.replace(call, arguments=self.text(call.arguments))
                for call in message.tool_calls
            )
            text = self.text(message.content)
            known = msgspec.structs.replace(message, content=text, tool_calls=calls)
            self._known[message] = known
        return known

    def marks(self, messages: Sequence[Message]) -> tuple[MessageDigest, ...]:
        """What each message means, but for what is masked."""
        found: list[MessageDigest] = []
        calls: dict[str, int] = {}
        for message in messages:
            found.append(digest_message(self.message(message), calls))
            calls = call_positions(message) if message.tool_calls else calls
        return tuple(found)

    def tools(self, tools: Sequence[Tool]) -> dict[str, str]:
        """Each tool's declaration by its name; made once while they stay the same object."""
        if tools is not self._tools[0]:
            told = {tool.name: self.text(msgspec.json.encode(tool).decode()) for tool in tools}
            self._tools = (tools, told)
        return self._tools[1]
