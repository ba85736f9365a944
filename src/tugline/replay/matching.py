"""Match requests with recorded responses, and describe differences. Pure functions.

A recording stores the messages that each request added; here conversations are whole again, so that
a request is recognized by its messages. An interrupted and resumed answer is one response. Values
that may differ between two runs, such as dates, durations and folders, are masked on both sides
before the comparison; masked values that differ are reported.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import msgspec
import numpy as np

from tugline.chat.model_call import Request
from tugline.chat.tokens import count_shared
from tugline.errors import UsageError
from tugline.gateway.turns import MessageDigest, call_positions, digest_message
from tugline.traces.lineage import adds_to_parent
from tugline.types import Call, CallOutcome, Message, Role, Sampling, Tool, VersionSpan

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
"""Regular expressions by name."""


def folder_patterns(workdir: str, home: str) -> dict[str, str]:
    """Return patterns of a session's folders, also with dashes in place of special characters."""
    patterns: dict[str, str] = {}
    parent = str(PurePath(workdir).parent) if workdir and home else ""
    folder = parent if parent == str(PurePath(home).parent) and parent != "/" else ""
    for name, path in (("workdir", workdir), ("home", home), ("folder", folder)):
        if path:
            dashed = re.sub(r"[^A-Za-z0-9]", "-", path)
            patterns[name] = rf"(?:{re.escape(path)}|{re.escape(dashed)})(?!\w)"
    return patterns


class Normalizer:
    """Mask of one side's values: folders first, then custom patterns, then built-in ones."""

    def __init__(self, folders: Mapping[str, str], custom: Sequence[str] = ()) -> None:
        """Raises `UsageError` for an invalid regular expression in `custom`."""
        for pattern in custom:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"--mask {pattern!r} is not a valid regular expression: {error}"
                ) from error
        numbered = {f"mask{number}": pattern for number, pattern in enumerate(custom, start=1)}
        named = {**folders, **numbered, **BUILT_IN}
        self._pattern = re.compile("|".join(f"(?P<{name}>{p})" for name, p in named.items()))
        self.mask_message = functools.cache(self._mask_message)
        """Cached function that masks the text and tool calls of a message."""

    def mask_text(self, text: str) -> str:
        """Replace every match by the name of its pattern."""
        return self._pattern.sub(lambda match: f"<{match.lastgroup}>", text)

    def find_values(self, text: str) -> list[tuple[str, str]]:
        """Return every match in `text` with the name of its pattern."""
        return [(str(match.lastgroup), match[0]) for match in self._pattern.finditer(text)]

    def _mask_message(self, message: Message) -> Message:
        calls = tuple(
            msgspec.structs.replace(call, arguments=self.mask_text(call.arguments))
            for call in message.tool_calls
        )
        text = self.mask_text(message.content)
        return msgspec.structs.replace(message, content=text, tool_calls=calls)

    def digest_messages(self, messages: Sequence[Message]) -> tuple[MessageDigest, ...]:
        """Return the digests of masked messages."""
        digests: list[MessageDigest] = []
        positions: dict[str, int] = {}
        for message in messages:
            digests.append(digest_message(self.mask_message(message), positions))
            positions = call_positions(message) if message.tool_calls else positions
        return tuple(digests)

    def mask_tools(self, tools: Sequence[Tool]) -> dict[str, str]:
        """Return the masked declaration of each tool, by name."""
        return {tool.name: self.mask_text(msgspec.json.encode(tool).decode()) for tool in tools}


# --------------------------------------------------------------------------- responses
_BEFORE, _AFTER = 40, 80
"""Number of characters shown before and after the first difference."""
_SHORT = 60


@dataclass(frozen=True, slots=True, eq=False)
class RecordedResponse:
    """A recorded answer and its request."""

    call: Call
    """The call, with all tokens of the answer."""
    messages: tuple[Message, ...]
    """Messages of the request, sorted by `sort_tool_results`."""
    result_order: tuple[str, ...]
    """Tool call ids in the original order of their results."""
    digests: tuple[MessageDigest, ...]
    tools: dict[str, str]

    def answers(self, digests: tuple[MessageDigest, ...], tools: Mapping[str, str]) -> bool:
        """Whether a request with these messages and tools is the recorded one."""
        return digests == self.digests and tools == self.tools

    @property
    def required(self) -> bool:
        """Whether a replay must request the answer; false if the client left before its end."""
        return self.call.outcome is not CallOutcome.CLIENT_GONE


def list_responses(calls: Sequence[Call], normalizer: Normalizer) -> list[RecordedResponse]:
    """Return every response in the order of the requests."""
    answered: list[tuple[tuple[Message, ...], Call]] = []
    """Conversations and the calls that answer them."""
    index_of: dict[int, int] = {}
    """Index in `answered` of a call's answer, by call number."""
    for call in sorted(calls, key=lambda call: call.number):
        index = index_of.get(call.parent) if call.parent is not None else None
        if index is None or not adds_to_parent(call):
            index_of[call.number] = len(answered)
            answered.append((call.messages, call))
            continue
        before, earlier = answered[index]
        if call.resumed:
            index_of[call.number] = index
            answered[index] = before, _join_resumed(earlier, call)
        else:
            index_of[call.number] = len(answered)
            answer = () if earlier.answer is None else (earlier.answer,)
            answered.append(((*before, *answer, *call.messages), call))
    responses = []
    for conversation, call in answered:
        messages = sort_tool_results(conversation)
        digests = normalizer.digest_messages(messages)
        order = list_result_ids(conversation)
        tools = normalizer.mask_tools(call.tools)
        responses.append(RecordedResponse(call, messages, order, digests, tools))
    return responses


def sort_tool_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Sort the results of parallel tool calls in the order of the calls."""
    ordered: list[Message] = []
    positions: dict[str, int] = {}
    start = 0
    for message in messages:
        ordered.append(message)
        if message.role is not Role.TOOL:
            positions = call_positions(message)
            start = len(ordered)
        elif len(ordered) - start > 1:
            ordered[start:] = sorted(
                ordered[start:], key=lambda result: positions.get(result.tool_call_id or "", 0)
            )
    return tuple(ordered)


def list_result_ids(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the ids of tool calls in the order of their results."""
    return tuple(message.tool_call_id for message in messages if message.tool_call_id)


def _join_resumed(call: Call, rest: Call) -> Call:
    """Join an interrupted answer and the call that resumed it."""
    shift = len(call.sampled_ids)
    later = (VersionSpan(v.version, v.start + shift, v.end + shift) for v in rest.versions)
    return msgspec.structs.replace(
        call,
        sampled_ids=np.concatenate((call.sampled_ids, rest.sampled_ids)),
        logprobs=np.concatenate((call.logprobs, rest.logprobs)),
        versions=(*call.versions, *later),
        unreported_tokens=call.unreported_tokens + rest.unreported_tokens,
        answer=rest.answer,
        finish=rest.finish,
        stop=rest.stop,
        outcome=rest.outcome,
    )


# --------------------------------------------------------------------------- differences
class Difference(msgspec.Struct, frozen=True):
    """A difference between a request and the recording."""

    request: int
    """Position among the requests of this run, from 0."""
    call: int | None
    """Number of the recorded call compared with the request; None if none is left."""
    where: str
    """Position, such as ``message 5 (tool), the result of bash {"command": "ls"}``."""
    recorded: str = ""
    """Text around the first difference."""
    replayed: str = ""
    id_at: int | None = None
    """Position of the first different prompt id, if ids are compared."""


def compare_messages(
    response: RecordedResponse,
    old: Normalizer,
    request: Request,
    new: Normalizer,
    digests: Sequence[MessageDigest],
) -> tuple[str, str, str]:
    """Return the position of the first different tool or message, and both texts."""
    tools = new.mask_tools(request.tools)
    for name in [*response.tools, *tools]:
        if response.tools.get(name) != tools.get(name):
            texts = response.tools.get(name, ""), tools.get(name, "")
            return f"tool {name!r}", *_clip_difference(*texts)
    at = count_shared(response.digests, digests)
    theirs = response.messages[at] if at < len(response.messages) else None
    ours = request.messages[at] if at < len(request.messages) else None
    message = ours or theirs
    if message is None:
        return "no difference: it repeats a request that was answered", "", ""
    where = f"message {at} ({message.role.value}){_name_call(message, request.messages[:at])}"
    if theirs is not None and ours is not None:
        return where, *_clip_difference(_format(theirs, old), _format(ours, new))
    where += " is new" if theirs is None else " is missing"
    recorded = _format(theirs, old)[:_AFTER] if theirs else ""
    return where, recorded, _format(ours, new)[:_AFTER] if ours else ""


def compare_sampling(
    response: RecordedResponse, requested: Sampling
) -> tuple[str, str, str] | None:
    """Return the first different field of requested sampling, and both values; None if equal."""
    for field in Sampling.__struct_fields__:
        theirs, ours = getattr(response.call.requested, field), getattr(requested, field)
        if theirs != ours:
            return f"sampling.{field}", str(theirs), str(ours)
    return None


def _name_call(message: Message, before: Sequence[Message]) -> str:
    """Name the tool call that a result belongs to."""
    if message.tool_call_id is None:
        return ""
    calls = (call for earlier in reversed(before) for call in earlier.tool_calls)
    call = next((call for call in calls if call.id == message.tool_call_id), None)
    return "" if call is None else f", the result of {call.name} {call.arguments[:_SHORT]}"


def _format(message: Message, normalizer: Normalizer) -> str:
    masked = normalizer.mask_message(message)
    calls = [f"[{call.name} {call.arguments}]" for call in masked.tool_calls]
    failed = ["[failed]"] if masked.failed else []
    images = [f"[image {image.url[:_SHORT]}]" for image in masked.images]
    return f"{message.role.value}: " + "\n".join([*failed, masked.content, *calls, *images])


def _clip_difference(old: str, new: str) -> tuple[str, str]:
    """Return both texts clipped around the first difference."""
    at = count_shared(old, new)
    start, end = max(0, at - _BEFORE), at + _AFTER
    front = "..." if start else ""
    return (
        front + old[start:end] + ("..." if end < len(old) else ""),
        front + new[start:end] + ("..." if end < len(new) else ""),
    )
