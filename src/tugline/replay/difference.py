"""How a request differs from the recorded one it comes nearest to, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tugline.chat.request import Request
from tugline.gateway.canonical import MessageDigest
from tugline.replay.normalizers import Normalizers
from tugline.replay.responses import RecordedResponse
from tugline.types import Message, Sampling

_BEFORE, _AFTER = 40, 80
"""Characters told around the first one that differs."""
_SHORT = 60


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as recorded."""

    request: int
    """Position among the requests of this run, from 0."""
    call: int | None
    """The recorded call that it was compared with; None where there is none left."""
    where: str
    """Such as ``message 5 (tool), the result of bash {"command": "ls"}``."""
    recorded: str = ""
    """Text around the first character that differs."""
    replayed: str = ""
    id_at: int | None = None
    """Position of the first prompt id that differs, where ids are compared."""


def shared(take: RecordedResponse, marks: Sequence[MessageDigest]) -> int:
    """How many leading messages mean the same."""
    pairs = zip(take.marks, marks, strict=False)
    same = (index for index, (old, new) in enumerate(pairs) if old != new)
    return next(same, min(len(take.marks), len(marks)))


def of_messages(
    take: RecordedResponse,
    old: Normalizers,
    request: Request,
    new: Normalizers,
    marks: Sequence[MessageDigest],
) -> tuple[str, str, str]:
    """Where, recorded and replayed: the first tool or message that differs."""
    tools = new.tools(request.tools)
    for name in [*take.tools, *tools]:
        if take.tools.get(name) != tools.get(name):
            return f"tool {name!r}", *_around(take.tools.get(name, ""), tools.get(name, ""))
    at = shared(take, marks)
    theirs = take.messages[at] if at < len(take.messages) else None
    ours = request.messages[at] if at < len(request.messages) else None
    message = ours or theirs
    if message is None:
        return "nothing: it asks once more for what was answered", "", ""
    where = f"message {at} ({message.role.value}){_of_call(message, request.messages[:at])}"
    if theirs is None or ours is None:
        return (
            where + (" is new" if theirs is None else " is missing"),
            _written(theirs, old)[:_AFTER],
            _written(ours, new)[:_AFTER],
        )
    return where, *_around(_written(theirs, old), _written(ours, new))


def of_sampling(take: RecordedResponse, asked: Sampling) -> tuple[str, str, str] | None:
    """The first sampling field that the harness asked for otherwise; None if all is the same."""
    for field in Sampling.__struct_fields__:
        theirs, ours = getattr(take.call.requested, field), getattr(asked, field)
        if theirs != ours:
            return f"sampling.{field}", str(theirs), str(ours)
    return None


def _of_call(message: Message, before: Sequence[Message]) -> str:
    """Which tool call a result belongs to."""
    calls = (call for one in reversed(before) for call in one.tool_calls)
    found = next((call for call in calls if call.id == message.tool_call_id), None)
    if message.tool_call_id is None or found is None:
        return ""
    return f", the result of {found.name} {found.arguments[:_SHORT]}"


def _written(message: Message | None, masks: Normalizers) -> str:
    if message is None:
        return ""
    masked = masks.message(message)
    calls = [f"[{call.name} {call.arguments}]" for call in masked.tool_calls]
    kind = ["[failed]"] if masked.failed else []
    pictures = [f"[image {image.url[:_SHORT]}]" for image in masked.images]
    return f"{message.role.value}: " + "\n".join([*kind, masked.content, *calls, *pictures])


def _around(old: str, new: str) -> tuple[str, str]:
    """Both texts around the first character that differs."""
    pairs = zip(old, new, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))
    start, end = max(0, at - _BEFORE), at + _AFTER
    front = "..." if start else ""
    return (
        front + old[start:end] + ("..." if end < len(old) else ""),
        front + new[start:end] + ("..." if end < len(new) else ""),
    )
