"""Read what ``/v1/chat/completions`` answers: text, tool calls, and the ids beside them.

Every engine puts ids somewhere else; `ChatReader` finds them where vLLM and the embedded engine put
them, `TextReader` does without. Decoding is typed, so fields that nobody needs cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from tugline.chat.engines.base import CallDelta, Delta
from tugline.chat.engines.generate import Fault, finish_of, inner_error
from tugline.errors import EngineError
from tugline.types import Finish, VersionSpan


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class Choice(msgspec.Struct):
    """An answer, or what an event adds to it."""

    delta: _Said | None = None
    message: _Said | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Ids(msgspec.Struct):
    input_ids: msgspec.Raw = msgspec.Raw()
    output_ids: list[list[int]] = []


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Metadata(msgspec.Struct):
    weight_versions: list[_Span] | None = None


class Reply(msgspec.Struct):
    """A reply, or one event of it: of every engine's own fields those that matter."""

    choices: list[Choice] = []
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    usage: _Usage | None = None
    sglext: _Ids | None = None
    metadata: _Metadata | None = None
    error: Fault | None = None


_decoder = msgspec.json.Decoder(Reply)


@dataclass(slots=True)
class Gathered:
    """What becomes one `Delta`; reasoning comes before text, text before calls."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: tuple[VersionSpan, ...] = ()
    finish: Finish | None = None
    prompt: bytes | None = None
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    stop: str | None = None
    unreported_tokens: int = 0
    prompt_count: int = 0

    def full(self, said: _Said) -> bool:
        """Whether `said` would come out of order."""
        thought = said.reasoning or said.reasoning_content
        return bool((thought and (self.text or self.calls)) or (said.content and self.calls))

    def say(self, said: _Said) -> bool:
        """Add text, reasoning and calls; whether there were any."""
        thought = said.reasoning or said.reasoning_content or ""
        self.reasoning += thought
        self.text += said.content or ""
        for place, call in enumerate(said.tool_calls or ()):
            index = place if call.index is None else call.index
            function = call.function or _Function()
            name, arguments = function.name or "", function.arguments or ""
            self.calls.append(CallDelta(index, call.id or "", name, arguments))
        return bool(thought or said.content or said.tool_calls)

    def delta(self) -> Delta:
        """The same as a value."""
        return Delta(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            spans=self.spans,
            finish=self.finish,
            prompt=self.prompt,
            text=self.text,
            reasoning=self.reasoning,
            calls=tuple(self.calls),
            stop=self.stop,
            unreported_tokens=self.unreported_tokens,
            prompt_count=self.prompt_count,
        )


_NOTHING = Gathered()


class Reading:
    """The frame of a reader; what an event brings is the subclass's business."""

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """One `Delta`, or more where text and calls took turns within one read."""
        return self._deltas([read(payload) for payload in payloads])

    def read_body(self, body: bytes) -> list[Delta]:
        """The first choice. Raises `EngineError` where there is none."""
        reply = read(body)
        if not reply.choices:
            msg = "the engine answered without a choice"
            raise EngineError(msg)
        return self._deltas([reply])

    def _deltas(self, replies: list[Reply]) -> list[Delta]:
        done: list[Gathered] = [Gathered()]
        for reply in replies:
            for choice in reply.choices[:1]:
                said = choice.delta or choice.message
                if said is not None and done[-1].full(said):
                    done.append(Gathered())
            self.take(reply, done[-1])
        return [gathered.delta() for gathered in done if gathered != _NOTHING]

    def take(self, reply: Reply, to: Gathered) -> None:
        """Add what an event brings. Raises `EngineError` where ids are missing."""
        raise NotImplementedError


class ChatReader(Reading):
    """Ids and logprobs come with each event."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._count = 0

    def take(self, reply: Reply, to: Gathered) -> None:
        """Tokens first: text without any is of no use."""
        for choice in reply.choices[:1]:
            ids = choice.token_ids or []
            self._count += len(ids)
            to.ids += ids
            to.logprobs += logprobs_of(choice)
            to.prompt = raw(choice.prompt_token_ids) or to.prompt
            if (told_by(choice, to) or to.finish) and not self._count:
                raise EngineError(self._advice)
        to.prompt = raw(reply.prompt_token_ids) or to.prompt


class TextReader(Reading):
    """No ids at all: tokens are only counted."""

    def __init__(self) -> None:
        self._count = 0

    def take(self, reply: Reply, to: Gathered) -> None:
        """An event with text counts as a token until the server tells the true number."""
        for choice in reply.choices[:1]:
            fresh = int(told_by(choice, to))
            to.unreported_tokens += fresh
            self._count += fresh
        if reply.usage is not None and reply.usage.completion_tokens:
            to.unreported_tokens += reply.usage.completion_tokens - self._count
            self._count = reply.usage.completion_tokens
            to.prompt_count = reply.usage.prompt_tokens


def told_by(choice: Choice, to: Gathered) -> bool:
    """Add a choice's text and end; whether it said anything."""
    said = choice.delta or choice.message
    told = said is not None and to.say(said)
    to.finish = finish_of(choice.finish_reason) or to.finish
    for stop in (choice.stop_reason, choice.matched_stop):
        to.stop = stop if isinstance(stop, str) else to.stop
    return told


def logprobs_of(choice: Choice) -> list[float]:
    """One number for each sampled token."""
    content = choice.logprobs.content if choice.logprobs is not None else None
    return [item.logprob for item in content or ()]


def raw(value: msgspec.Raw) -> bytes | None:
    """A JSON array as it was written; None for nothing and for null."""
    data = bytes(value)
    return data if data.startswith(b"[") else None


def read(payload: bytes) -> Reply:
    """Decode a reply. Raises `EngineError` on nonsense, and when it tells of a failure."""
    try:
        reply = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"the engine sent a reply that cannot be read: {error}"
        raise EngineError(msg) from error
    if reply.error is not None:
        raise inner_error(payload, reply.error)
    return reply
