"""Token source that answers from a recording in place of an engine.

A request is recognized by its masked messages and tools; among equal ones by the ids of its prompt,
then by order, so requests of parallel agents may come in any order. It is answered with the
recorded ids, log probabilities and versions. A request that is not recorded ends the session, or is
sampled if there is an engine and the fork is reached. Replayed calls are marked (`Call.replayed`),
so no token is trained twice (I2), and live tokens are sampled in the context of this run (I1).
"""

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Self

import msgspec
import numpy as np

from tugline.chat.engines.base import CallDelta, Delta, EngineFormat, EngineRequest, Feature
from tugline.chat.engines.generate import Embedded
from tugline.chat.model_call import Request
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import count_shared
from tugline.errors import BudgetExhausted
from tugline.gateway.gate import Gate
from tugline.gateway.replicas import Progress, Replica, TokenSource
from tugline.gateway.turns import MessageDigest
from tugline.recording.records import Header
from tugline.replay.matching import (
    Difference,
    Normalizer,
    RecordedResponse,
    compare_messages,
    compare_sampling,
    folder_patterns,
    list_responses,
    list_result_ids,
    sort_tool_results,
)
from tugline.types import Call, Message, Mode, Role, shared_prefix
from tugline.web.engine_http import ModelCard

_DELTA_TOKENS = 16
_NOT_IN_ANSWERS = frozenset({"time", "duration", "order"})
"""Names of masks whose values are not replaced in answers."""
_texts = attrgetter("where", "recorded", "replayed")
_MIN_VALUE = 4
"""Minimum length of a value that is replaced in answers, in characters."""


@dataclass(frozen=True, slots=True)
class Live:
    """Engine and settings of a fork, which is sampled from the recorded call `at` on."""

    engine: TokenSource
    """Engine in the recording's mode, not opened yet."""
    at: int
    samples: int = 1
    """Number of sessions to fork."""
    slots: int = 1
    """Number of sessions that run at a time."""
    first: int = 0
    """Number of the first session; earlier forks from the same call have lower numbers."""


@dataclass(slots=True)
class ReplayState:
    """Progress of a session that is answered from the recording."""

    normalizer: Normalizer
    remaining: list[RecordedResponse]
    """Responses not requested yet."""
    requests: int = 0
    replayed: int = 0
    exact: int = 0
    """Number of replayed responses whose request had the recorded prompt ids."""
    adapted: int = 0
    """Number of replayed responses in which a recorded value was replaced by this run's."""
    live: int = 0
    ended: bool = False
    differences: list[Difference] = field(default_factory=list)
    masked: dict[str, dict[str, str]] = field(default_factory=dict)
    """Differing values: mask name to recorded value to this run's value."""
    aliases: dict[MessageDigest, MessageDigest] = field(default_factory=dict)
    """Digest of the recorded message by digest of a message reported as different."""

    def add_difference(self, difference: Difference) -> None:
        """Add a difference, unless an equal one was added already."""
        if _texts(difference) not in map(_texts, self.differences):
            self.differences.append(difference)

    def substitute(self, text: str) -> str:
        """Replace recorded values in `text` by those of this run."""
        for name, values in self.masked.items():
            for old, new in values.items() if name not in _NOT_IN_ANSWERS else ():
                if len(old) >= _MIN_VALUE and old in text:
                    literal = new.replace("\\", r"\\")
                    text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", literal, text)
        return text

    def compare_values(self, old: Normalizer, response: RecordedResponse, request: Request) -> None:
        """Collect masked values that differ from the recorded ones."""
        for theirs, ours in zip(response.messages, request.messages, strict=False):
            if theirs.content == ours.content:
                continue
            values = old.find_values(theirs.content), self.normalizer.find_values(ours.content)
            for (name, was), (other, now) in zip(*values, strict=False):
                if name == other and was != now:
                    self.masked.setdefault(name, {})[was] = now

    def compare_order(self, theirs: Sequence[str], ours: Sequence[str]) -> None:
        """Record in `masked` that results of parallel calls came in another order."""
        if theirs != ours and sorted(theirs) == sorted(ours):
            moved = [(a, b) for a, b in zip(theirs, ours, strict=True) if a != b]
            was, now = (", ".join(ids) for ids in zip(*moved, strict=True))
            self.masked.setdefault("order", {})[was] = now


@dataclass(eq=False)
class RecordedSource(TokenSource):
    """Source of the responses of one recording, for any number of independent sessions."""

    header: Header
    calls: Sequence[Call]
    masks: Sequence[str] = ()
    """Regular expressions; an invalid one raises `UsageError`."""
    _: KW_ONLY
    tokenizer: Tokenizer | None = None
    spent_status: int = 400
    go_on: bool = False
    """Whether a different request is answered with the most similar response."""
    live: Live | None = None

    def __post_init__(self) -> None:
        header = self.header
        live = self.live
        self._normalizer = self._make_normalizer(header)
        self._live: TokenSource | None = live.engine if live else None
        self.gate = live.engine.gate if live else Gate()
        fork = live.at if live else len(self.calls)
        responses = list_responses(self.calls, self._normalizer)
        self.responses = [recorded for recorded in responses if recorded.call.number < fork]
        self._after_fork = [recorded for recorded in responses if recorded.call.number >= fork]
        self._states: dict[str, ReplayState] = {}
        self.wire: EngineFormat = live.engine.wire if live else _make_format(header)
        self.forked_from = f"{header.session.id}@{fork}" if live else ""

    async def __aenter__(self) -> Self:
        if self._live is not None:
            await self._live.__aenter__()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._live is not None:
            await self._live.__aexit__(None, None, None)

    async def model(self) -> ModelCard:
        """Return the engine's model, or the recorded one."""
        if self._live is not None:
            return await self._live.model()
        return ModelCard(self.header.model, self.header.window)

    def choose(self, session: str, avoid: Sequence[str] = ()) -> Replica:
        """See `TokenSource.choose`; a recording has one replica."""
        return self._live.choose(session, avoid) if self._live else Replica("recorded:")

    async def abort(self, request_id: str, url: str) -> bool:
        """See `TokenSource.abort`; recorded answers are complete at once."""
        return not url or self._live is None or await self._live.abort(request_id, url)

    async def answers(self, url: str) -> bool:
        """See `TokenSource.answers`."""
        return not url or self._live is None or await self._live.answers(url)

    def open_session(self, header: Header) -> None:
        """Start a session's replay; its folders are masked like those of the recording."""
        state = ReplayState(self._make_normalizer(header), list(self.responses))
        self._states[header.session.id] = state

    def state(self, session: str) -> ReplayState:
        """Return the state of a session's replay; an initial state if it was never opened."""
        return self._states.get(session) or ReplayState(self._normalizer, list(self.responses))

    def _make_normalizer(self, header: Header) -> Normalizer:
        return Normalizer(folder_patterns(header.workdir, header.home), self.masks)

    async def sample(
        self, ask: EngineRequest, session: str, progress: Progress, avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Delta]:
        """Yield the recorded or the engine's answer. Raises `BudgetExhausted` without either."""
        state = self.state(session)
        await progress.wait_until_sendable()
        response = self._find_response(state, ask)
        if response is not None:
            progress.note_sent("")
            progress.note_accepted()
            for delta in self._make_deltas(self._adapt(state, response.call)):
                yield delta
        elif self._live is not None and not state.ended:
            state.live += 1
            live = self._live.sample(ask, session, progress, avoid)
            async with contextlib.aclosing(live) as deltas:
                async for delta in deltas:
                    yield delta
        else:
            msg = "the replay has ended, because this request differs from the recorded one"
            raise BudgetExhausted(msg, status=self.spent_status)

    # ----------------------------------------------------------------------- matching
    def _find_response(self, state: ReplayState, ask: EngineRequest) -> RecordedResponse | None:
        """Return the response to a request; None if there is none or the engine must answer."""
        if state.ended:
            return None
        result_order = list_result_ids(ask.request.messages)
        number = state.requests
        messages = sort_tool_results(ask.request.messages)
        request = msgspec.structs.replace(ask.request, messages=messages)
        state.requests += 1
        digests = state.normalizer.digest_messages(messages)
        digests = tuple(state.aliases.get(candidate, candidate) for candidate in digests)
        tools = state.normalizer.mask_tools(request.tools)
        matches = [candidate for candidate in state.remaining if candidate.answers(digests, tools)]
        if not matches:
            similar = self._report_difference(state, ask, request, digests, number)
            if similar is None:
                return None
            matches = [similar]
        response = min(
            matches, key=lambda hit: (not hit.required, _first_different_id(hit, ask) is not None)
        )
        state.remaining.remove(response)
        state.replayed += 1
        state.exact += ask.prompt is not None and _first_different_id(response, ask) is None
        state.compare_order(response.result_order, result_order)
        state.compare_values(self._normalizer, response, request)
        sampling = compare_sampling(response, request.sampling)
        if sampling is not None:
            state.add_difference(Difference(number, response.call.number, *sampling))
        return response

    def _report_difference(
        self,
        state: ReplayState,
        ask: EngineRequest,
        request: Request,
        digests: tuple[MessageDigest, ...],
        number: int,
    ) -> RecordedResponse | None:
        """Report a request that is not recorded; with `go_on`, return the most similar response."""
        if self._live is not None and self._is_after_fork(state, request, digests):
            return None
        candidates = state.remaining or self.responses
        similar = max(
            candidates, key=lambda candidate: count_shared(candidate.digests, digests), default=None
        )
        if similar is None:
            state.add_difference(
                Difference(number, None, "there is no recorded call before the fork")
            )
            state.ended = True
            return None
        where, old, new = compare_messages(
            similar, self._normalizer, request, state.normalizer, digests
        )
        where = where if state.remaining else f"a request beyond the recorded ones: {where}"
        at = _first_different_id(similar, ask)
        state.add_difference(Difference(number, similar.call.number, where, old, new, at))
        if not self.go_on or similar not in state.remaining:
            state.ended = True
            return None
        state.aliases.update(zip(digests, similar.digests, strict=False))
        return similar

    def _is_after_fork(
        self, state: ReplayState, request: Request, digests: tuple[MessageDigest, ...]
    ) -> bool:
        tools = state.normalizer.mask_tools(request.tools)
        return (
            bool(state.live)
            or not any(response.required for response in state.remaining)
            or any(response.answers(digests, tools) for response in self._after_fork)
        )

    # ----------------------------------------------------------------------- answering
    def _make_deltas(self, call: Call) -> Iterator[Delta]:
        """Yield the answer in pieces; the first piece marks it as replayed."""
        yield Delta(replayed=call, unreported_tokens=call.unreported_tokens)
        if call.mode is not Mode.EXACT:
            prompt = msgspec.json.encode(call.prompt_ids.tolist()) if len(call.prompt_ids) else None
            answer = call.answer or Message(Role.ASSISTANT)
            calls = [
                CallDelta(i, tool.name, tool.arguments) for i, tool in enumerate(answer.tool_calls)
            ]
            thought = answer.reasoning or ""
            yield Delta(prompt=prompt, reasoning=thought, text=answer.content, calls=calls)
        for span in call.versions:
            for start in range(span.start, span.end, _DELTA_TOKENS):
                piece = slice(start, min(start + _DELTA_TOKENS, span.end))
                ids = call.sampled_ids[piece]
                logprobs = call.logprobs[piece]
                yield Delta(ids=ids.tolist(), logprobs=logprobs.tolist(), version=span.version)
        yield Delta(finish=call.finish, stop=call.stop)

    def _adapt(self, state: ReplayState, call: Call) -> Call:
        """Replace recorded values in an answer, such as ids of sub-agents or folders.

        A changed text is tokenized again and has log probabilities of 0, because none are known;
        like every replayed answer it is context and never trained.
        """
        tokenizer = self.tokenizer if call.mode is Mode.EXACT else None
        text = (
            msgspec.json.encode(call.answer).decode()
            if tokenizer is None
            else tokenizer.decode(call.sampled_ids.tolist())
        )
        adapted = state.substitute(text)
        if adapted == text:
            return call
        state.adapted += 1
        if tokenizer is None:
            answer = msgspec.json.decode(adapted, type=Message)
            return msgspec.structs.replace(call, answer=answer)
        ids = np.asarray(tokenizer.encode(adapted), np.int32)
        span = msgspec.structs.replace(call.versions[-1], start=0, end=len(ids))
        zeros = np.zeros(len(ids), np.float32)
        return msgspec.structs.replace(call, sampled_ids=ids, logprobs=zeros, versions=(span,))


def _first_different_id(response: RecordedResponse, ask: EngineRequest) -> int | None:
    """Return the position of the first different prompt id; None if equal or unknown."""
    if ask.prompt is None:
        return None
    theirs, ours = response.call.prompt_ids, ask.prompt.to_array()
    at = shared_prefix(theirs, ours)
    return None if at == len(theirs) == len(ours) else at


def _make_format(header: Header) -> EngineFormat:
    """Make a format with the recorded engine's name and mode, which sends no requests."""
    wire = Embedded()
    wire.name = header.engine
    wire.features = frozenset(Feature)
    wire.mode = header.mode
    return wire
