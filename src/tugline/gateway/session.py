"""One session while its model calls are accepted: its budgets, its calls, its recording.

Budgets are checked before anything is sampled, so a refused call costs nothing.
"""

import asyncio
import contextlib
import copy
import hashlib
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import msgspec

from tugline import errors, log
from tugline.chat.dialects.base import Dialect, HttpRequest
from tugline.chat.model_call import Request
from tugline.chat.tokens import mend_surrogates
from tugline.gateway.answer import ENDED, AnswerState
from tugline.gateway.choice import Choice
from tugline.gateway.completion import Completion
from tugline.gateway.context import EngineContext
from tugline.gateway.model_call import ModelCall, Prompt
from tugline.gateway.policy import (
    InFlight,
    contract_for,
    find_engine_failure,
    find_kind,
    resolve_sampling,
)
from tugline.gateway.sampled_answer import SampledAnswer
from tugline.gateway.terms import SessionState, SessionTerms
from tugline.gateway.transcript import Transcript
from tugline.gateway.turns import Conversation
from tugline.recording import file as recordings
from tugline.recording.file import Writer
from tugline.recording.records import Header, RecordedEventKind
from tugline.types import MalformedCalls, SpentLimit
from tugline.web.http import Http

T = TypeVar("T")
_RETRY = "x-stainless-retry-count"
_MANY_OBJECTS = 1000
"""Number of JSON objects from which a request is parsed in a thread."""
_options = attrgetter("sampling", "n", "tool_choice", "constraint", "thread", "logprobs")
"""Getter of a request's options, beside its prompt."""
_log = log.get("gateway.session")

Clock = Callable[[], float]
"""Function that returns monotonic seconds."""


class LiveSession:
    """State of a session while its model calls are accepted."""

    def __init__(
        self,
        header: Header,
        writer: Writer,
        engine: EngineContext,
        terms: SessionTerms,
        *,
        clock: Clock,
        on_hang: Callable[[float], None],
    ) -> None:
        """`clock` measures the time budget.

        `on_hang` is called with the seconds for which an engine hung; they are not charged.
        """
        self._on_hang = on_hang
        self._credited = 0.0
        self.id = header.session.id
        self.secret_digest = b""
        self.transcript = Transcript(self.id, engine, writer)
        self.transcript.declares_tools = terms.offers_tools
        self.log_context = log.bound()
        """Ids bound to the session's log events, taken from the caller that opened it."""
        self.running: set[Completion] = set()
        settings = engine.settings
        self.bytes_in_flight = InFlight(
            "request bytes", settings.session_bytes, engine.bytes_in_flight
        )
        self._answers_in_flight = InFlight(
            "answers", settings.session_answers, engine.answers_in_flight
        )
        self._preparing = asyncio.Lock()
        """Held while a request is parsed and rendered, possibly in a thread."""
        self._task = header.task
        self._engine = engine
        self._clock = clock
        self._contract = contract_for(header.task.sampling, header.session.sample)
        self._terms = terms
        self._opened = clock()
        self._next_number = 0
        """Number of the next call; numbers of failed calls are not used again."""
        self._recent: list[Completion] = []
        """Last calls, which a request may repeat."""
        self._overflow: errors.ContextOverflow | None = None
        self._refused_by: SpentLimit | None = None
        self._ended: errors.Unauthorized | None = None

    @property
    def tokens_left(self) -> int | None:
        """Tokens left to sample, less those reserved by running calls; None without a limit."""
        limit = self._task.limits.max_sampled_tokens
        reserved = sum(choice.content.sampling.max_tokens or 0 for choice in self._unended)
        return None if limit is None else limit - self.transcript.sampled_tokens - reserved

    @property
    def turns_left(self) -> int | None:
        """Model calls left, less the running ones, which are recorded if they do not fail."""
        limit = self._task.limits.max_turns
        return None if limit is None else limit - self.transcript.calls - len(self._unended)

    @property
    def _unended(self) -> list[Choice]:
        """Answers that have not been recorded, nor failed."""
        return [c for call in self.running for c in call.choices if c.state not in ENDED]

    def describe(self) -> SessionState:
        """Return the state. A session that ended with its last permitted call was not cut off."""
        cut = self.tokens_left is not None and self.tokens_left < 1
        error = self._recent[-1].error if self._recent else self._overflow
        if isinstance(error, errors.ContextOverflow) and self.transcript.sampled_tokens:
            error = None
        spent = self._refused_by or (SpentLimit.MAX_SAMPLED_TOKENS if cut else None)
        return SessionState(self.transcript.writer.path, find_engine_failure(error), spent)

    def restore(self, path: Path) -> None:
        """Continue from the calls that an earlier process recorded. Raises `CaptureError`."""
        calls = recordings.read(path).calls
        if calls:
            self._next_number = max(call.number for call in calls) + 1
            self._opened -= time.time() - calls[0].timings.received
        self.transcript.restore(calls)

    # ----------------------------------------------------------------------- calls
    async def read_body(self, http: Http, take: Callable[[int], None]) -> bytes:
        """Read the body; `take` counts its bytes. Raises `RequestError` or `Overloaded`.

        Raises `ContextOverflow`, on which agents compact, for a body too large for the window.
        """
        limit = self._engine.max_body
        settings = self._engine.settings
        try:
            return await http.body(limit, settings.body_timeout_s, take)
        except errors.TooLarge as error:
            if limit == settings.max_body:
                raise
            window = self._engine.card.max_model_len
            msg = f"{error}: this model's maximum context length is {window} tokens"
            raise errors.ContextOverflow(msg, param="messages", window=window) from error

    async def prepare(self, dialect: Dialect, incoming: HttpRequest) -> ModelCall:
        """Parse a request and make its prompt. Raises `RequestError` before anything is sampled."""
        body = incoming.body
        turns = self.transcript.turns
        async with self._preparing:
            known = self.transcript.parse_cache.known_bytes(body)
            size = len(body) - known
            objects = body.count(b"{", known)
            try:
                parse = partial(self._parse, dialect, incoming, known)
                request, prompt, repaired = await self._run(parse, size, objects)
                if isinstance(prompt, Conversation):
                    branch = partial(turns.branch, prompt, request.tools)
                    prompt = await self._run(branch, len(body), objects)
            except RecursionError as error:
                raise errors.RequestError("the request is nested too deeply") from error
        carried = dialect.carries_malformed(request)
        return ModelCall(
            dialect=dialect,
            request=msgspec.structs.replace(request, thread=prompt.thread),
            prompt=prompt,
            malformed=self._task.malformed if carried else MalformedCalls.TEXT,
            retry=incoming.headers.get(_RETRY, "0") != "0",
            repaired=repaired,
        )

    async def _run(self, work: Callable[[], T], size: int, objects: int) -> T:
        """Do work on so many bytes and JSON objects, in a thread if this may take long."""
        if size < self._engine.settings.large_body and objects < _MANY_OBJECTS:
            return work()
        async with self._engine.large:
            return await asyncio.to_thread(work)

    def _parse(
        self, dialect: Dialect, incoming: HttpRequest, known: int
    ) -> tuple[Request, Prompt | Conversation, bool]:
        """Parse a request, and make its prompt if it extends a recorded call.

        The first `known` bytes are those of an earlier request. The third value is whether lone
        surrogates were repaired.
        """
        transcript = self.transcript
        body = mend_surrogates(incoming.body, known)
        repaired = body is not incoming.body
        incoming = msgspec.structs.replace(incoming, body=body)
        try:
            request = dialect.parse(incoming, transcript.parse_cache)
            self._engine.check_request(request, len(body) - known)
            transcript.declares_tools = transcript.declares_tools or bool(request.tools)
            if request.prompt is not None:
                prompt = transcript.turns.match_text(request.prompt, request.thread)
                return request, prompt, repaired
            kind = find_kind(request, self._terms)
            thread = msgspec.structs.replace(request.thread, kind=kind)
            found = transcript.turns.extend(request.messages, request.tools, thread)
        finally:
            transcript.parse_cache.release_body()
        return request, found, repaired

    async def complete(self, call: ModelCall) -> Completion:
        """Start sampling, or return what this call repeats. Raises `RequestError`."""
        key = _request_key(call)
        earlier = self._find_repeated(key, call)
        if earlier is not None and earlier.state is AnswerState.ABANDONED:
            await earlier.wait_recorded()  # then it can be resumed
            earlier = self._find_repeated(key, call)
        if earlier is not None and earlier.state is not AnswerState.BROKEN_OFF:
            self.transcript.note(RecordedEventKind.REPEATED, call=earlier.choices[0].number)
            return earlier
        count = call.request.n
        window = self._check_size(call)
        await self._wait_for_budget(count)
        if earlier is not None and earlier.state is not AnswerState.BROKEN_OFF:
            return await self.complete(call)  # another request was faster
        with contextlib.ExitStack() as taken:
            self._admit(count)
            taken.enter_context(self._answers_in_flight.hold())(count)
            choices = self._make_choices(call, window)
            if earlier is not None:
                choices[0].resume(earlier.choices[0])
            completion = Completion(key, choices, self._engine.settings)
            self.running.add(completion)
            taken.callback(self.running.discard, completion)
            given_back = taken.pop_all().close
        completion.task.add_done_callback(lambda _task: given_back())
        repeatable = [old for old in self._recent if not self._is_extended(old)]
        self._recent = [*repeatable, completion][-self._engine.settings.recent_calls :]
        return completion

    def credit(self, seconds: float) -> None:
        """Credit the last `seconds` to the time budget; parallel calls are credited once."""
        now = self._clock()
        lost = now - max(now - seconds, self._credited)
        self._credited = now
        self._opened += lost
        self._on_hang(lost)

    async def _wait_for_budget(self, count: int) -> None:
        """Wait while running calls, which may give some back, hold the rest of a budget."""
        within_s = self._engine.settings.pause_timeout_s
        while self.running and (_lacks(self.turns_left, count) or _lacks(self.tokens_left, count)):
            tasks = {completion.task for completion in self.running}
            if not (await asyncio.wait(tasks, timeout=within_s, return_when="FIRST_COMPLETED"))[0]:
                return

    def _check_size(self, call: ModelCall) -> int | None:
        """Return the tokens that the window leaves for an answer. Raises `RequestError`."""
        count = call.request.n
        if count > (most := self._engine.settings.session_answers):
            raise errors.RequestError(f"n={count} is too many; the limit is {most}", param="n")
        return self._engine.remaining_window(self._engine.count_prompt(call))

    def _make_choices(self, call: ModelCall, window: int | None) -> list[Choice]:
        request = call.request
        left = self.tokens_left
        limits = window, None if left is None else left // request.n
        policy = self._task.sampling_policy
        choices: list[Choice] = []
        for number in range(self._next_number, self._next_number + request.n):
            sampling = resolve_sampling(request.sampling, self._contract, policy, limits, number)
            content = SampledAnswer(number, call, sampling, self.transcript, self._engine)
            choices.append(Choice(content, self.transcript, self._engine))
        self._next_number += request.n
        return choices

    def _find_repeated(self, key: bytes, call: ModelCall) -> Completion | None:
        """Return the completion that a call repeats; None if it asks for another sample.

        An equal request is a repetition if its client declares a retry, if the first answer was
        not delivered, or if the first was streamed and this one is not. Equal requests of two
        waiting clients are two samples, and so is one sent after the answer was delivered.
        """
        for old in reversed(self._recent):
            over = old.state in {AnswerState.FAILED, AnswerState.RESUMED}
            if old.key != key or over or self._is_extended(old):
                continue
            undelivered = old.readers == 0 and old.state is not AnswerState.DELIVERED
            if call.retry or undelivered or (old.request.stream and not call.request.stream):
                return old
        return None

    def _is_extended(self, completion: Completion) -> bool:
        """Whether a later call extends one of the completion's answers."""
        return any(self.transcript.turns.is_extended(c.number) for c in completion.choices)

    def _admit(self, count: int) -> None:
        """Raise `RequestError` if the session may not make this number of calls."""
        if self._ended is not None:  # ended while the request was read or prepared
            raise self._ended
        limits = self._task.limits
        if not self._next_number:  # a prewarmed session may have waited until now
            self._opened = self._clock()
        if _lacks(self.turns_left, count):
            spent = SpentLimit.MAX_TURNS
            reason = f"the session has used its {limits.max_turns} model calls"
        elif _lacks(self.tokens_left, count):
            spent = SpentLimit.MAX_SAMPLED_TOKENS
            reason = f"the session has used its {limits.max_sampled_tokens} sampled tokens"
        elif limits.calls_s is not None and self._clock() - self._opened > limits.calls_s:
            spent = SpentLimit.CALLS_S
            reason = f"the session has used its {limits.calls_s:g} seconds"
        elif self.transcript.full:
            spent = SpentLimit.MAX_RECORDING
            reason = "the session's recording is full"
        else:
            return
        self._refused_by = spent
        msg = f"{reason}; no further calls are accepted"
        raise errors.BudgetExhausted(msg, status=self._terms.spent_status)

    # ----------------------------------------------------------------------- recording
    def note_refusal(self, error: errors.TuglineError, status: int) -> None:
        """Record that a request was answered with an error, without the request's content."""
        if isinstance(error, errors.ContextOverflow):
            self._overflow = copy.copy(error)  # without frames, which refer to this object
        if isinstance(error, errors.RequestError | errors.EngineError):
            field = error.param if isinstance(error, errors.RequestError) else None
            detail = f"{status} {type(error).__name__} {field or ''}"
            self.transcript.note(RecordedEventKind.REFUSED, detail.rstrip())

    async def close(self) -> None:
        """Cancel running calls and close the recording."""
        self._ended = errors.Unauthorized("the session has ended, and its key is no longer valid")
        for completion in list(self.running):
            completion.cancel(self._ended)
            await completion.wait_recorded()
        await asyncio.to_thread(self.transcript.writer.close)


def _lacks(left: int | None, count: int) -> bool:
    return left is not None and left < count


def _request_key(call: ModelCall) -> bytes:
    """Digest a request's meaning and options; equal for its repetitions."""
    options = msgspec.msgpack.encode((call.dialect.name, *_options(call.request)))
    return hashlib.blake2b(options, key=call.prompt.digest, digest_size=16).digest()
