"""Answers from a recording where an engine would be: the gateway does not know the difference.

`Recorded` is a `tugline.gateway.replicas.TokenSource`. A request is recognised by what it says,
with `Normalizers` for what may differ; among requests that say the same, by its prompt's ids, then
by order, so parallel agents may arrive in any. It is answered by the recorded ids, log
probabilities and versions. One that is not in the recording ends the session, or is sampled where
there is an engine and the fork is reached. Replayed calls are marked (`Call.replayed`), so no token
is trained twice (I2), and what is sampled is sampled in the context that this run really has (I1).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from tugline.chat.engines.base import CallDelta, Delta, EngineFormat, EngineRequest, Feature
from tugline.chat.engines.generate import Embedded
from tugline.chat.request import Request
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import BudgetExhausted
from tugline.gateway.canonical import MessageDigest
from tugline.gateway.replicas import ModelCard, Replica, TokenSource
from tugline.recording.records import Header
from tugline.replay.difference import Difference, of_messages, of_sampling, shared
from tugline.replay.normalizers import Normalizers
from tugline.replay.responses import RecordedResponse, order, ordered, takes
from tugline.types import Call, Message, Mode, shared_prefix

_PIECE = 16
"""Tokens that are told together."""
_UNSAID = frozenset({"time", "duration", "order"})
"""Masks whose values say when, not what: no answer refers to them."""
_SHORTEST = 4
"""Characters of a value that can be looked for in an answer."""


@dataclass(frozen=True, slots=True)
class Live:
    """Who answers from the recorded call `at` on."""

    engine: TokenSource
    """Not open yet; it speaks the recording's mode."""
    at: int
    samples: int = 1
    """Sessions that go live from there."""
    slots: int = 1
    """How many of them run at a time."""
    first: int = 0
    """Number of the first; earlier forks from the same call have those before it."""


@dataclass(slots=True)
class Run:
    """One session that is answered from the recording: what it was told, and how it differed."""

    masks: Normalizers
    left: list[RecordedResponse]
    """Recorded answers that were not asked for yet."""
    asked: int = 0
    replayed: int = 0
    exact: int = 0
    """Of those, the requests with the recorded prompt ids."""
    adapted: int = 0
    """Of those, the answers in which a recorded value became this run's."""
    live: int = 0
    ended: bool = False
    differences: list[Difference] = field(default_factory=list)
    masked: dict[str, dict[str, str]] = field(default_factory=dict)
    """Mask to recorded value to this run's, where the two differ."""
    alike: dict[MessageDigest, MessageDigest] = field(default_factory=dict)
    """Messages that were told to differ, as what they stand for."""

    def note(self, found: Difference) -> None:
        """Keep a difference, unless it is one that was told before."""
        told = {(one.where, one.recorded, one.replayed) for one in self.differences}
        if (found.where, found.recorded, found.replayed) not in told:
            self.differences.append(found)

    def in_its_words(self, text: str) -> str:
        """A recorded text with this run's names for what has others here."""
        for name, values in self.masked.items():
            for old, new in values.items() if name not in _UNSAID else ():
                if len(old) >= _SHORTEST and old in text:
                    literal = new.replace("\\", r"\\")
                    text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", literal, text)
        return text


class Recorded(TokenSource):
    """The answers of one recording, for any number of sessions that each begin anew."""

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        header: Header,
        calls: Sequence[Call],
        masks: Normalizers,
        masks_of: Callable[[str], Normalizers],
        *,
        tokenizer: Tokenizer | None = None,
        spent_status: int = 400,
        go_on: bool = False,
        live: Live | None = None,
    ) -> None:
        """`masks` are the recording's, `masks_of` gives those of a session by its id.

        With `go_on` a request that differs is answered as the one it comes nearest to.
        """
        self._header, self._masks_of, self._tokenizer = header, masks_of, tokenizer
        self._masks, self._status, self._go_on = masks, spent_status, go_on
        self._live: TokenSource | None = live.engine if live else None
        fork = live.at if live else len(calls)
        every = takes(calls, masks)
        self.takes = [take for take in every if take.call.number < fork]
        self._beyond = [take for take in every if take.call.number >= fork]
        self._runs: dict[str, Run] = {}
        self.wire: EngineFormat = live.engine.wire if live else _format(header)
        self.forked_from = f"{header.session.id}@{fork}" if live else ""

    async def __aenter__(self) -> Self:
        if self._live is not None:
            await self._live.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            await self._live.__aexit__(kind, error, trace)

    async def model(self) -> ModelCard:
        """The engine's, where there is one, else the recorded one."""
        if self._live is not None:
            return await self._live.model()
        return ModelCard(self._header.model, self._header.window)

    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """The engine's choice; a recording has one place."""
        return self._live.choose(session, avoid) if self._live else Replica("recorded:")

    async def abort(self, request_id: str, url: str) -> None:
        """A recorded answer is over at once."""
        if self._live is not None:
            await self._live.abort(request_id, url)

    def run(self, session: str) -> Run:
        """How a session is doing."""
        if session not in self._runs:
            self._runs[session] = Run(self._masks_of(session), list(self.takes))
        return self._runs[session]

    async def sample(
        self, ask: EngineRequest, session: str, used: list[str], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """The recorded answer, or the engine's. Raises `BudgetExhausted` where there is neither."""
        run = self.run(session)
        take = self._take(run, ask)
        if take is not None:
            for delta in self._told(run, take.call):
                yield delta
        elif self._live is not None and not run.ended:
            run.live += 1
            async with contextlib.aclosing(self._live.sample(ask, session, used, avoid)) as deltas:
                async for delta in deltas:
                    yield delta
        else:
            msg = "the replay has ended: this request is not as recorded"
            raise BudgetExhausted(msg, status=self._status)

    # ----------------------------------------------------------------------- recognising
    def _take(self, run: Run, ask: EngineRequest) -> RecordedResponse | None:
        """The answer to this request; None where there is none, or the engine is to give it."""
        if ask.request is None or run.ended:
            return None
        came, number = order(ask.request.messages), run.asked
        messages = ordered(ask.request.messages)
        request = msgspec.structs.replace(ask.request, messages=messages)
        run.asked += 1
        marks = tuple(run.alike.get(one, one) for one in run.masks.marks(request.messages))
        tools = run.masks.tools(request.tools)
        same = [one for one in run.left if one.asks(marks, tools)]
        if not same:
            expected = self._differs(run, ask, request, marks, number)
            if expected is None:
                return None
            same = [expected]
        same.sort(key=lambda one: (not one.needed, _first_other(one, ask) is not None))
        take = same[0]
        run.left.remove(take)
        run.replayed += 1
        run.exact += _first_other(take, ask) is None and ask.prompt is not None
        if take.order != came and sorted(take.order) == sorted(came):
            _note_order(run, take.order, came)
        _compare(run, self._masks, take, request)
        sampling = of_sampling(take, request.sampling)
        if sampling is not None:
            run.note(Difference(number, take.call.number, *sampling))
        return take

    def _differs(
        self,
        run: Run,
        ask: EngineRequest,
        request: Request,
        marks: tuple[MessageDigest, ...],
        number: int,
    ) -> RecordedResponse | None:
        """Note how; the answer to give all the same, or None for the engine or nobody."""
        if self._live is not None and (
            run.live
            or not any(take.needed for take in run.left)
            or any(take.asks(marks, run.masks.tools(request.tools)) for take in self._beyond)
        ):
            return None
        known = run.left or self.takes
        near = max(known, key=lambda take: shared(take, marks), default=None)
        if near is None:
            run.note(Difference(number, None, "nothing is recorded before the fork"))
        else:
            where, old, new = of_messages(near, self._masks, request, run.masks, marks)
            where = where if run.left else f"one request more than recorded: {where}"
            at = _first_other(near, ask)
            run.note(Difference(number, near.call.number, where, old, new, at))
        if not self._go_on or near is None or near not in run.left:
            run.ended = True
            return None
        run.alike.update(zip(marks, near.marks, strict=False))
        return near

    # ----------------------------------------------------------------------- telling
    def _told(self, run: Run, call: Call) -> list[Delta]:
        """The answer in pieces, first that it is a replayed one."""
        call = self._adapted(run, call)
        deltas = [Delta(replayed=call, unreported_tokens=call.unreported_tokens)]
        if call.mode is not Mode.EXACT:
            prompt = msgspec.json.encode(call.prompt_ids.tolist()) if len(call.prompt_ids) else None
            answer = call.answer
            calls = answer.tool_calls if answer else ()
            parts = [CallDelta(i, c.id, c.name, c.arguments) for i, c in enumerate(calls)]
            told = (answer.reasoning or "", answer.content) if answer else ("", "")
            deltas.append(Delta(prompt=prompt, reasoning=told[0], text=told[1], calls=tuple(parts)))
        for span in call.versions:
            for start in range(span.start, span.end, _PIECE):
                piece = slice(start, min(start + _PIECE, span.end))
                ids, logprobs = call.sampled_ids[piece], call.logprobs[piece]
                deltas.append(Delta(ids=ids, logprobs=logprobs, version=span.version))
        deltas.append(Delta(finish=call.finish, stop=call.stop))
        return deltas

    def _adapted(self, run: Run, call: Call) -> Call:
        """The answer in this run's names: an agent's id that it waits for, a folder it looks at.

        Its ids are the tokenizer's then and have no log probabilities, so 0 stands for them; like
        every replayed answer it is context and never trained.
        """
        known = self._tokenizer if call.mode is Mode.EXACT else None
        text = (
            msgspec.json.encode(call.answer).decode()
            if known is None
            else known.decode(call.sampled_ids.tolist())
        )
        told = run.in_its_words(text)
        if told == text:
            return call
        run.adapted += 1
        if known is None:
            return msgspec.structs.replace(call, answer=msgspec.json.decode(told, type=Message))
        ids = np.asarray(known.encode(told), np.int32)
        last = msgspec.structs.replace(call.versions[-1], start=0, end=len(ids))
        zeros = np.zeros(len(ids), np.float32)
        return msgspec.structs.replace(call, sampled_ids=ids, logprobs=zeros, versions=(last,))


def _first_other(take: RecordedResponse, ask: EngineRequest) -> int | None:
    """Position of the first prompt id that differs; None if none does, or none are known."""
    if ask.prompt is None:
        return None
    theirs, ours = take.call.prompt_ids, ask.prompt.to_array()
    at = shared_prefix(theirs, ours)
    return None if at == len(theirs) == len(ours) else at


def _note_order(run: Run, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Results of parallel calls came in another order."""
    was, now = zip(*((a, b) for a, b in zip(theirs, ours, strict=True) if a != b), strict=True)
    run.masked.setdefault("order", {})[", ".join(was)] = ", ".join(now)


def _compare(run: Run, old: Normalizers, take: RecordedResponse, request: Request) -> None:
    """Learn what is masked and differs."""
    for theirs, ours in zip(take.messages, request.messages, strict=False):
        if theirs.content == ours.content:
            continue
        pairs = zip(old.values(theirs.content), run.masks.values(ours.content), strict=False)
        for (name, was), (other, now) in pairs:
            if name == other and was != now:
                run.masked.setdefault(name, {})[was] = now


def _format(header: Header) -> EngineFormat:
    """As the recorded engine's; nothing is ever asked of it, and all that it could do is done."""
    wire = Embedded()
    wire.name = header.engine
    wire.mode = header.mode
    wire.features = frozenset(Feature)
    return wire
