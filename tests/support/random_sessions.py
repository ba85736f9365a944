"""Calls written by hand, and whole sessions made of drawn bytes.

A session is grown call by call as harnesses do: new turns, repeated requests, many answers to one
prompt, edits, compaction, sub-agents, titles, pictures, and engines that render again or return
only text. There are few distinct ids, so that accidental prefixes happen; byte 0 is always the
plainest choice, so that a failing example shrinks to a simple one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from msgspec.structs import replace

from support.calls import make_call
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Image,
    Message,
    Mode,
    Role,
    TraceKind,
    VersionSpan,
)


def show_images(*urls: str) -> tuple[Message, ...]:
    """Messages with these pictures."""
    return tuple(Message(Role.USER, images=(Image(url),)) for url in urls)


def whole(call: Call) -> list[int]:
    """Prompt and sampled ids of a call."""
    return [*call.prompt_ids.tolist(), *call.sampled_ids.tolist()]


class RandomSession(NamedTuple):
    """A session's calls in order of arrival, and the pictures in each call's prompt."""

    calls: list[Call]
    images: dict[int, tuple[str, ...]]


class _Bytes:
    """Choices read from drawn bytes; 0 after their end."""

    def __init__(self, data: bytes) -> None:
        self._left = iter(data)

    def below(self, n: int) -> int:
        return next(self._left, 0) % n

    def ids(self, most: int = 4) -> list[int]:
        return [self.below(3) for _ in range(self.below(most + 1))]


_WAYS = ("on", "on", "on", "again", "edit", "compact", "agent", "side", "fresh", "rerendered")
_FINISH = (Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.ABORT)
_OUTCOME = (
    CallOutcome.COMPLETE,
    CallOutcome.COMPLETE,
    CallOutcome.CLIENT_GONE,
    CallOutcome.ENGINE_LOST,
)


def session(data: bytes, name: str = "s") -> RandomSession:
    """Decode a session from bytes."""
    draw = _Bytes(data)
    grown: list[Call] = []
    seen: dict[int, tuple[str, ...]] = {}
    for number in range(1 + draw.below(9)):
        one, pictures = _next(draw, number, grown, seen)
        grown.append(_with_answer(draw, one, name))
        seen[number] = pictures
    random.Random(draw.below(256)).shuffle(grown)
    return RandomSession(grown, seen)


def _next(
    draw: _Bytes, number: int, grown: list[Call], seen: dict[int, tuple[str, ...]]
) -> tuple[Call, tuple[str, ...]]:
    """A call without its answer, and the pictures that its prompt holds."""
    back = draw.below(2 * len(grown)) if grown else 0
    base = grown[-1 - back if back < len(grown) else -1] if grown else None
    way = _WAYS[draw.below(len(_WAYS))]
    fresh = [draw.below(3), *draw.ids()]
    new = ("", "data:a", "data:b")[draw.below(3)] if draw.below(4) == 3 else ""
    added = show_images(new) if new else ()
    if base is None or way == "fresh":
        return make_call(number, fresh, [], messages=added), _digests(added)
    links: dict[str, Any] = {"parent": base.number, "thread": base.thread}
    if way in ("on", "rerendered"):
        known = seen[base.number]
        prompt = whole(base) + fresh
        if way == "rerendered":
            prompt = whole(base)[: draw.below(len(whole(base)) + 1)] + fresh
            links |= {"branch": Branch.ENGINE_RERENDERED, "mode": Mode.OBSERVED}
        elif draw.below(4) == 3:  # the recorded parent is missing or wrong
            links["parent"] = (None, draw.below(10))[draw.below(2)]
            links["parent"] = None if links["parent"] == number else links["parent"]
            everything = tuple(_URL[one] for one in known)
            branch = None if links["parent"] is None else Branch.HISTORY_EDITED
            links |= {"branch": branch, "messages": show_images(*everything) + added}
        made = make_call(number, prompt, [], **({"messages": added} | links))
        return made, known + _digests(added)
    prompt = base.prompt_ids.tolist() or fresh
    if way == "again":
        known = seen[base.number]
        messages = show_images(*(_URL[one] for one in known))
        links |= {"parent": None, "messages": messages}
        return make_call(number, prompt, [], **links), known
    if way == "edit":
        prompt = whole(base)[: draw.below(len(whole(base)) + 1)] + fresh
        links["branch"] = Branch.HISTORY_EDITED
    elif way == "compact":
        prompt = prompt[: 1 + draw.below(len(prompt))] + fresh
        links["branch"] = Branch.COMPACTED
    elif way == "agent":
        prompt = fresh
        links |= {"branch": Branch.NEW_THREAD, "kind": TraceKind.SUBAGENT, "thread": f"t{number}"}
        links["parent_thread"] = (base.thread, None)[draw.below(2)]
    elif way == "side":
        prompt = (fresh, whole(base) + fresh)[draw.below(2)]
        links |= {"kind": TraceKind.SIDE, "parent": None}
    return make_call(number, prompt, [], **(links | {"messages": added})), _digests(added)


def _with_answer(draw: _Bytes, asked: Call, name: str) -> Call:
    """The same call with an answer."""
    sampled = draw.ids()
    swap = draw.below(len(sampled) + 1)
    spans = (VersionSpan(3, 0, swap), VersionSpan(4, swap, len(sampled)))
    ended = replace(
        asked,
        session=name,
        finish=_FINISH[draw.below(4)],
        outcome=_OUTCOME[draw.below(4)],
        stop="x" if draw.below(8) == 7 else None,
        versions=tuple(span for span in spans if span.start < span.end),
    )
    if draw.below(10) == 9:
        nothing = asked.sampled_ids
        text = {"mode": Mode.TEXT, "unreported_tokens": 5, "versions": ()}
        return replace(ended, prompt_ids=nothing, **text)
    answered = make_call(asked.number, asked.prompt_ids, sampled)
    return replace(ended, sampled_ids=answered.sampled_ids, logprobs=answered.logprobs)


_URL = {Image(url).digest: url for url in ("data:a", "data:b")}


def _digests(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(image.digest for message in messages for image in message.images)


SESSIONS = st.binary(min_size=150, max_size=150).map(session)
