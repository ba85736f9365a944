"""One session while its model calls are accepted: its budgets, its calls, its recording.

Budgets are checked before anything is sampled, so a refused call costs nothing.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import msgspec

from tugline import errors, log
from tugline.chat.dialects.base import Dialect, HttpRequest
from tugline.chat.model_call import Request
from tugline.chat.tokens import mend_surrogates
from tugline.gateway.answer import ENDED, AnswerState
from tugline.gateway.choice import Choice
from tugline.gateway.completion import Completion
from tugline.gateway.context import EngineContext
from tugline.gateway.policy import (
    InFlight,
    check_request,
    contract_for,
    find_engine_failure,
    find_kind,
    resolve_sampling,
)
from tugline.gateway.prefix import WholePrompt
from tugline.gateway.prompt import Prompt
from tugline.gateway.sampled_answer import SampledAnswer
from tugline.gateway.terms import SessionState
from tugline.gateway.transcript import Transcript
from tugline.recording import file as recordings
from tugline.recording.file import Writer
from tugline.recording.records import Header, RecordedEventKind
from tugline.types import MalformedCalls, SpentLimit
from tugline.web.serve import Http

_MANY_OBJECTS = 1000
"""Number of JSON objects from which a request is parsed in a thread."""
_options = attrgetter("dialect", "sampling", "n", "tool_choice", "constraint", "thread", "logprobs")
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
        *,
        spent_status: int,
        clock: Clock,
        on_hang: Callable[[float], None],
    ) -> None:
        """`spent_status` is the HTTP status of a spent budget; `clock` measures the time budget.

        `on_hang` is called with the seconds for which an engine hung; they are not charged.
        """
        self._on_hang = on_hang
        self._credited = 0.0
        self.id = header.session.id
        self.secret_digest = b""
        self.transcript = Transcript(self.id, engine, writer)
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
        self._spent_status = spent_status
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

    async def prepare(
        self, dialect: Dialect, incoming: HttpRequest
    ) -> tuple[Request, Prompt, bool]:
        """Parse a request and make its prompt, in a thread if this may take long.

        The third value is whether lone surrogates were repaired in the body. Raises `RequestError`
        before anything is sampled.
        """
        body = incoming.body
        limit = self._engine.settings.large_body
        async with self._preparing:
            known = self.transcript.parse_cache.known_bytes(body)
            if len(body) - known < limit and body.count(b"{", known) < _MANY_OBJECTS:
                with contextlib.suppress(WholePrompt):
                    self.transcript.turns.may_render = len(body) < limit
                    return self._prepare(dialect, incoming, known)
            self.transcript.turns.may_render = True
            async with self._engine.large:
                return await asyncio.to_thread(self._prepare, dialect, incoming, known)

    def _prepare(
        self, dialect: Dialect, incoming: HttpRequest, known: int
    ) -> tuple[Request, Prompt, bool]:
        mended = mend_surrogates(incoming.body, known)
        repaired = mended is not incoming.body
        incoming = msgspec.structs.replace(incoming, body=mended)
        wire = self._engine.upstream.wire
        try:
            request = dialect.parse(incoming, self.transcript.parse_cache)
            check_request(request, wire.mode, wire.features)
            self._engine.check_length(request, len(mended) - known)
            self._engine.check_tool_choice(request)
            self.transcript.declares_tools = self.transcript.declares_tools or bool(request.tools)
            if request.prompt is not None:
                prompt = self.transcript.turns.match_text(request.prompt, request.thread)
            else:
                thread = msgspec.structs.replace(request.thread, kind=find_kind(request))
                prompt = self.transcript.turns.match(request.messages, request.tools, thread)
        except RecursionError as error:
            raise errors.RequestError("the request is nested too deeply") from error
        finally:
            self.transcript.parse_cache.release_body()
        carried = dialect.carries_malformed(request)
        request = msgspec.structs.replace(
            request,
            thread=prompt.thread,
            dialect=dialect.name,
            malformed=self._task.malformed if carried else MalformedCalls.TEXT,
        )
        return request, prompt, repaired

    async def complete(self, request: Request, prompt: Prompt, *, retry: bool) -> Completion:
        """Start sampling, or return the completion that this request repeats.

        `retry` is whether the client declares the request a retry. Raises `RequestError`.
        """
        key = _request_key(request, prompt)
        earlier = self._find_repeated(key, stream=request.stream, retry=retry)
        if earlier is not None and earlier.state is AnswerState.ABANDONED:
            await earlier.wait_recorded()  # then it can be resumed
            earlier = self._find_repeated(key, stream=request.stream, retry=retry)
        if earlier is not None and earlier.state is not AnswerState.BROKEN_OFF:
            self.transcript.note(RecordedEventKind.REPEATED, call=earlier.choices[0].number)
            return earlier
        window = self._check_size(request, prompt)
        await self._wait_for_budget(request.n)
        if earlier is not None and earlier.state is not AnswerState.BROKEN_OFF:
            # Another request was faster.
            return await self.complete(request, prompt, retry=retry)
        with contextlib.ExitStack() as taken:
            self._admit(request.n)
            taken.enter_context(self._answers_in_flight.hold())(request.n)
            choices = self._make_choices(request, prompt, window)
            if earlier is not None:
                choices[0].resume(earlier.choices[0])
            completion = Completion(key, choices, self._engine.settings)
            self.running.add(completion)
            taken.callback(self.running.discard, completion)
            given_back = taken.pop_all().close
        completion.task.add_done_callback(lambda _task: given_back())
        repeatable = [call for call in self._recent if not self._is_extended(call)]
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

    def _check_size(self, request: Request, prompt: Prompt) -> int | None:
        """Return the tokens that the window leaves for an answer. Raises `RequestError`."""
        if request.n > (most := self._engine.settings.session_answers):
            raise errors.RequestError(f"n={request.n} is too many; the bound is {most}", param="n")
        length = self._engine.count_prompt(request, prompt.tokens)
        return self._engine.remaining_window(length)

    def _make_choices(self, request: Request, prompt: Prompt, window: int | None) -> list[Choice]:
        left = self.tokens_left
        limits = window, None if left is None else left // request.n
        policy = self._task.sampling_policy
        choices: list[Choice] = []
        for number in range(self._next_number, self._next_number + request.n):
            sampling = resolve_sampling(request.sampling, self._contract, policy, limits, number)
            content = SampledAnswer(
                number, request, prompt, sampling, self.transcript, self._engine
            )
            choices.append(Choice(content, self.transcript, self._engine))
        self._next_number += request.n
        return choices

    def _find_repeated(self, key: bytes, *, stream: bool, retry: bool) -> Completion | None:
        """Return the call that a request repeats; None if it is a request for another sample.

        An equal request is a repetition if its client declares a retry, if the first answer was
        not delivered, or if the first was streamed and this one is not. Equal requests of two
        waiting clients are two samples, and so is one sent after the answer was delivered.
        """
        for old in reversed(self._recent):
            over = old.state in {AnswerState.FAILED, AnswerState.RESUMED}
            if old.key != key or over or self._is_extended(old):
                continue
            undelivered = old.readers == 0 and old.state is not AnswerState.DELIVERED
            if retry or undelivered or (old.request.stream and not stream):
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
            words = f"{limits.max_turns} model calls"
        elif _lacks(self.tokens_left, count):
            spent = SpentLimit.MAX_SAMPLED_TOKENS
            words = f"{limits.max_sampled_tokens} sampled tokens"
        elif limits.calls_s is not None and self._clock() - self._opened > limits.calls_s:
            spent = SpentLimit.CALLS_S
            words = f"{limits.calls_s:g} seconds"
        elif self.transcript.full:
            spent = SpentLimit.MAX_RECORDING
            words = "room in the recording"
        else:
            return
        self._refused_by = spent
        msg = f"the session has used its {words}; this is the end of its budget"
        raise errors.BudgetExhausted(msg, status=self._spent_status)

    # ----------------------------------------------------------------------- recording
    def note_refusal(self, error: errors.TuglineError, status: int) -> None:
        """Record that a request was answered with an error, without the request's content."""
        if isinstance(error, errors.ContextOverflow):
            self._overflow = error
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


def _request_key(request: Request, prompt: Prompt) -> bytes:
    """Digest a request's meaning and options; equal for its repetitions."""
    options = msgspec.msgpack.encode(_options(request))
    return hashlib.blake2b(options, key=prompt.digest, digest_size=16).digest()
