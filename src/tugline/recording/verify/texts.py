"""Whether sampled ids say what the harness was told.

In exact mode the gateway made the text out of the ids, so the same reading is done again from the
recorded ids, with the recorded template and tokenizer, and must give the recorded answer: text,
reasoning, and tool calls by name and JSON value. Not recorded is how an answer began that the
gateway had begun itself (a forced tool call) or taken up where another broke off; each way that
fits the ids is tried. In observed mode the engine made the text; then its words must be in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tugline.chat.request import ChoiceMode, ToolChoice
from tugline.chat.response import Piece, ReasoningDelta, TextDelta
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import END, Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import ConfigError
from tugline.recording.folder import tokenizer_of
from tugline.recording.lineage import held
from tugline.recording.records import Header
from tugline.types import Call, CallOutcome, Ids, Message, Mode, Role, ToolCall

_NONE: Ids = np.empty(0, np.int32)


class _Start(NamedTuple):
    """Where an answer begins: its prompt, what it was made to begin with, what was said before."""

    prompt: Ids
    forced: Ids | None = None
    before: Ids = _NONE


class Texts:
    """Reads answers back; tokenizers and templates are made once for many sessions."""

    def __init__(self, tokenizer: Path | None = None) -> None:
        """`tokenizer` is used in place of those beside the recordings. Raises `ConfigError`."""
        self._other = None if tokenizer is None else Tokenizer.load(tokenizer)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._renderings: dict[tuple[str, str, str], Rendering] = {}

    def faults(
        self, recording: Path, header: Header | None, calls: Sequence[Call]
    ) -> dict[int, str]:
        """One line for each call, by number, whose ids do not say its answer.

        Raises `ConfigError` saying what is missing, where that cannot be found out.
        """
        told = [call for call in calls if call.answer is not None and call.mode is not Mode.TEXT]
        if not told:
            return {}
        if header is None:
            msg = "the recording has no header, so its tokenizer is not known"
            raise ConfigError(msg)
        known = {call.number: call for call in calls}
        tokenizer = self._tokenizer(recording, header)
        rendering = self._rendering(header, tokenizer) if header.template else None
        faults = {}
        for call in told:
            exact = rendering if call.mode is Mode.EXACT else None
            said = _otherwise(tokenizer, exact, call, known)
            if said:
                told_as = _short(call.answer)
                faults[call.number] = f"call {call.number} was told as {told_as}; its ids: {said}"
        return faults

    def _tokenizer(self, recording: Path, header: Header) -> Tokenizer:
        known = self._other or self._tokenizers.get(header.tokenizer)
        if known is None:
            known = tokenizer_of(recording, header)
            if known is None:
                msg = "no tokenizer is kept beside the recording; give --tokenizer"
                raise ConfigError(msg)
            self._tokenizers[header.tokenizer] = known
        return known

    def _rendering(self, header: Header, tokenizer: Tokenizer) -> Rendering:
        retention = header.thinking_retention or "all"
        key = (header.tokenizer, header.template, retention)
        if key not in self._renderings:
            made = Rendering(tokenizer, header.template, thinking_retention=retention)
            self._renderings[key] = made
        return self._renderings[key]


def _otherwise(
    tokenizer: Tokenizer, rendering: Rendering | None, call: Call, known: Mapping[int, Call]
) -> str:
    """What the ids of a call say in place of its answer; empty if they say that."""
    if call.sampled_ids.min(initial=0) < 0:
        return "no tokens"
    if rendering is None:
        return "" if _holds(tokenizer, call) else "not all of that"
    plain = None
    for reading in _readings(rendering, call, known):
        if _meaning(reading) == _meaning(call.answer):
            return ""
        plain = plain or reading
    return _short(plain)


# --------------------------------------------------------------------------- exact mode
def _readings(rendering: Rendering, call: Call, known: Mapping[int, Call]) -> Iterator[Message]:
    """What the gateway can have told for these ids; the plain reading first."""
    yield _read(rendering, call, _Start(call.prompt_ids))
    begun = _taken_up(call, known)
    if begun is not None:
        yield _read(rendering, call, begun)
    start = begun or _Start(call.prompt_ids)
    for names in ((), *((tool.name,) for tool in call.tools)):
        mode = ChoiceMode.NAMED if names else ChoiceMode.REQUIRED
        forced = rendering.force_tool_call(ToolChoice(mode, names))
        if forced is not None and np.array_equal(start.prompt[-len(forced) :], forced):
            prompt = start.prompt[: -len(forced)]
            yield _read(rendering, call, _Start(prompt, forced, start.before))


def _taken_up(call: Call, known: Mapping[int, Call]) -> _Start | None:
    """The start of an answer that goes on where earlier ones broke off; None if it does not."""
    first, before = call, _NONE
    while not first.messages and first.parent is not None and first.parent in known:
        parent = known[first.parent]
        if held(first, parent) != len(parent.prompt_ids) + len(parent.sampled_ids):
            break
        first, before = parent, np.concatenate((parent.sampled_ids, before))
    return None if first is call else _Start(first.prompt_ids, before=before)


def _read(rendering: Rendering, call: Call, start: _Start) -> Message:
    """The answer as a gateway reads it. One that broke off is told as far as it was certain."""
    decoder = StreamParser(
        rendering,
        start.prompt[-END:],
        f"{call.number}",
        stops=call.sampling.stop,
        forced=start.forced,
        tools=call.tools,
    )
    decoder.feed(start.before)
    pieces = decoder.feed(call.sampled_ids)
    if call.outcome is CallOutcome.CLIENT_GONE:
        return _joined(pieces)
    return decoder.finish()[1]


def _joined(pieces: Sequence[Piece]) -> Message:
    return Message(
        Role.ASSISTANT,
        "".join(one.text for one in pieces if isinstance(one, TextDelta)),
        tool_calls=tuple(one for one in pieces if isinstance(one, ToolCall)),
        reasoning="".join(one.text for one in pieces if isinstance(one, ReasoningDelta)) or None,
    )


def _meaning(message: Message | None) -> tuple[str, str, list[tuple[str, Any]]] | None:
    if message is None:
        return None
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    return message.content, message.reasoning or "", calls


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


# --------------------------------------------------------------------------- observed mode
def _holds(tokenizer: Tokenizer, call: Call) -> bool:
    """Whether text, reasoning and tool names are among what was sampled, but for blank space."""
    told = call.answer or Message(Role.ASSISTANT)
    ids: list[int] = call.sampled_ids.tolist()
    texts = [_dense(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (False, True)]
    words = [told.content, told.reasoning or "", *(one.name for one in told.tool_calls)]
    return all(any(_dense(word) in text for text in texts) for word in words)


def _dense(text: str) -> str:
    return "".join(text.split())


def _short(message: Message | None) -> str:
    """A message in a few words."""
    if message is None:
        return "nothing"
    parts = [f"text {message.content[:40]!r}"] if message.content else []
    parts += [f"reasoning {message.reasoning[:40]!r}"] if message.reasoning else []
    parts += [f"{one.name}({one.arguments[:40]})" for one in message.tool_calls]
    return ", ".join(parts) or "nothing"
