"""What calls share: the engine and its template, and within a session the recording.

`EngineContext` belongs to a gateway, `Transcript` to one session. `EngineReport` is the result of
probing an engine.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.engines import ROUTES
from tugline.chat.engines.base import EngineFormat, Feature
from tugline.chat.model_call import ChoiceMode, Request
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokens import TokenSequence
from tugline.errors import (
    CaptureError,
    ContextOverflow,
    EngineError,
    TuglineError,
    Unsupported,
    UsageError,
)
from tugline.gateway.policy import DEFAULTS, CallSettings, InFlight
from tugline.gateway.prefix import CallTree
from tugline.gateway.replicas import TokenSource
from tugline.histogram import MOMENTS, Distribution
from tugline.recording.file import Writer
from tugline.recording.records import Header, RecordedEvent, RecordedEventKind
from tugline.recording.tokenizer_file import save_tokenizer
from tugline.types import Call, Failure, LogprobMeaning, Mode, Session, SpentLimit, Task
from tugline.web.engine_http import ModelCard


@dataclass(slots=True)
class Traffic:
    """Counters over all recorded model calls."""

    calls: Counter[str] = field(default_factory=Counter)
    """By `CallOutcome`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were answered by an error, by its class."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    first_token_s: Distribution = field(default_factory=lambda: Distribution(MOMENTS))
    """From the request to the first token."""
    answer_s: Distribution = field(default_factory=Distribution)
    """From the request to the last token."""

    def add(self, call: Call, prompt_tokens: int) -> None:
        """Count a recorded call."""
        times = call.timings
        self.calls[call.outcome] += 1
        self.prompt_tokens += prompt_tokens
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        if times.first_token is not None and times.last_token is not None:
            self.first_token_s.add(times.first_token - times.received)
            self.answer_s.add(times.last_token - times.received)

    @classmethod
    def total(cls, parts: Iterable["Traffic"]) -> "Traffic":
        """The sum of counters."""
        whole = cls()
        for part in parts:
            whole.calls.update(part.calls)
            whole.refused.update(part.refused)
            whole.prompt_tokens += part.prompt_tokens
            whole.sampled_tokens += part.sampled_tokens
            whole.first_token_s.merge(part.first_token_s)
            whole.answer_s.merge(part.answer_s)
        return whole


_log = log.get("gateway.engine")
_LONG = 6
"""Characters a token from which a text is unlikely to fit."""
_PIECE = 1 << 14
"""Characters that are encoded at once."""


@dataclass(slots=True)
class EngineContext:
    """What every call is answered with."""

    upstream: TokenSource
    card: ModelCard
    rendering: Rendering | None
    """None in observed and text mode."""
    settings: CallSettings = DEFAULTS
    tokenizer: str = ""
    """SHA-256 of the tokenizer's file, once it is kept beside the recordings."""
    version: int = 0
    """Announced version of the weights, for engines that do not report their own."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear while calls are paused."""
    traffic: Traffic = field(default_factory=Traffic)
    bytes_in_flight: InFlight = field(init=False)
    """Request bodies of all sessions."""
    answers_in_flight: InFlight = field(init=False)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Held by a request that is parsed and rendered in a thread."""

    def __post_init__(self) -> None:
        self.bytes_in_flight = InFlight("request bytes", self.settings.gateway_bytes)
        self.answers_in_flight = InFlight("answers", self.settings.gateway_answers)

    @property
    def max_body(self) -> int:
        """Bytes of the largest request: in exact mode, of one that can fit the window."""
        most, window = self.settings.max_body, self.card.max_model_len
        if not window or self.rendering is None:
            return most
        return min(most, (1 << 20) + window * self.settings.token_bytes)

    def check_length(self, request: Request, new_bytes: int) -> None:
        """Raise `ContextOverflow` for far more text than the window holds.

        It is encoded in pieces until that is certain, so it costs no more than a full window, and
        only if the `new_bytes` of the body may hold so much.
        """
        window, rendering = self.card.max_model_len, self.rendering
        if not window or rendering is None or new_bytes < _LONG * window:
            return
        texts = [message.content for message in request.messages]
        texts += [request.prompt] if isinstance(request.prompt, str) else []
        length = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                length += len(rendering.tokenizer.encode(text[start : start + _PIECE])) - 1
                self.remaining_window(length, counted="at least ")

    def check_tool_choice(self, request: Request) -> None:
        """Raise `Unsupported` if the template cannot enforce the tool choice."""
        rendering, choice = self.rendering, request.tool_choice
        if rendering is None or choice.mode is ChoiceMode.AUTO or not request.tools:
            return
        if choice.mode is ChoiceMode.NONE:
            if Feature.BAN in self.upstream.wire.features and rendering.markers.call >= 0:
                return
            msg = "tool_choice 'none' cannot be honoured here; send the request without tools"
            raise Unsupported(msg, param="tool_choice")
        if rendering.force_tool_call(choice) is None:
            mode = choice.mode.value
            msg = f"tool_choice {mode!r} cannot be honoured with this model's template"
            raise Unsupported(msg, param="tool_choice")

    def remaining_window(self, length: int, *, counted: str = "") -> int | None:
        """Tokens that a prompt of `length` leaves for an answer; None if only the engine knows.

        `counted` qualifies the length, such as "at least ".

        Raises `ContextOverflow` if there are none.
        """
        window = self.card.max_model_len
        if not window or self.rendering is None:
            return None
        if window - length < 1:
            msg = (
                f"the prompt has {counted}{length} tokens and leaves no room to answer: "
                f"this model's maximum context length is {window} tokens"
            )
            raise ContextOverflow(msg, param="messages", prompt=length, window=window)
        return window - length

    async def wait_until_resumed(self) -> None:
        """Wait while calls are paused. Raises `EngineError` when that takes too long."""
        if self.gate.is_set():
            return
        try:
            async with asyncio.timeout(self.settings.pause_timeout_s):
                await self.gate.wait()
        except TimeoutError as error:
            msg = f"the engine was paused for more than {self.settings.pause_timeout_s:.0f} s"
            raise EngineError(msg, status=503, retry_after=5.0) from error

    def keep_tokenizer(self, folder: Path) -> None:
        """Store the tokenizer beside the recordings in `folder`, which need it to be read."""
        if self.rendering is not None:
            self.tokenizer = save_tokenizer(self.rendering.tokenizer, folder)

    def header(self, session: Session, task: Task, workdir: str, home: str) -> Header:
        """First record of a session's recording."""
        rendering, wire = self.rendering, self.upstream.wire
        return Header(
            session=session,
            task=task,
            created=time.time(),
            tugline=version("tugline"),
            model=self.card.id,
            window=self.card.max_model_len,
            engine=wire.name,
            mode=wire.mode,
            template=rendering.name if rendering else "",
            thinking_retention=rendering.thinking_retention if rendering else "",
            tokenizer=self.tokenizer,
            workdir=workdir,
            home=home,
            forked_from=self.upstream.forked_from,
        )


def explain(error: Exception) -> TuglineError:
    """What a client is told of `error`; a mistake of the gateway's own is logged."""
    if isinstance(error, TuglineError):
        return error
    _log.error("gateway failed", exc_info=error)
    return TuglineError(f"the gateway failed: {error!r}")


# --------------------------------------------------------------------------- reports
class CheckOutcome(StrEnum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNKNOWN = "unknown"
    """It could not be determined."""


class ProbeCheck(msgspec.Struct, frozen=True):
    """One thing that was tried."""

    name: str
    outcome: CheckOutcome
    detail: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine supports, and what to change."""

    url: str
    engine: str
    """A key of `ROUTES`."""
    version: str = ""
    model: str
    window: int
    """Context in tokens, prompt and answer together; 0 if it does not say."""
    routes: dict[str, Mode]
    """The routes that work, the best first."""
    logprob_meaning: LogprobMeaning | None = None
    """None where it could not be measured."""
    checks: tuple[ProbeCheck, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def mode(self) -> Mode | None:
        """The best mode that works; None if nothing does."""
        return next(iter(self.routes.values()), None)

    @property
    def sound(self) -> bool:
        """Whether its samples have token ids."""
        return self.mode in {Mode.EXACT, Mode.OBSERVED}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the verdict."""
        return {**msgspec.structs.asdict(self), "mode": self.mode, "sound": self.sound}

    def wire(self, mode: Mode | None = None) -> EngineFormat:
        """The format to use, for `mode` or the best. Raises `UsageError` if it does not work."""
        for name, found in self.routes.items():
            if found is mode or (mode is None and found is not Mode.TEXT):
                return ROUTES[self.engine][name](self.logprob_meaning)
        wanted = f"no sound {mode} mode" if mode else "no mode that can be trained from"
        failed = [f"{one.name}: {one.detail}" for one in self.checks if one.outcome == "fail"]
        advice = "; ".join([*failed[:1], *self.advice]) or "see `tugline doctor`"
        msg = f"the engine at {self.url} ({self.engine} {self.version}) has {wanted}: {advice}"
        raise UsageError(msg)


# --------------------------------------------------------------------------- sessions
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What a harness and its sandbox tell a gateway of a session."""

    spent_status: int = 400
    """HTTP status of a spent budget: the one that the harness stops on."""
    offers_tools: bool = False
    """Whether its calls declare tools, so that one without is a side call."""
    workdir: str = ""
    """Its working folder and its home, recorded for a replay."""
    home: str = ""
    key: str = ""
    """The key of an earlier process that died: the session goes on from its recording."""


DEFAULT_TERMS = SessionTerms()
"""Of a harness that is not known."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Address and key of an open session."""

    base_url: str
    """Without ``/v1``: each harness appends what its CLI wants."""
    key: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A live session as it is, or a closed one as it ended."""

    path: Path
    """Of its recording."""
    failure: Failure | None = None
    """Why its last call got no answer, if that was the engine or its window.

    A session that outgrows the window later has answers to be judged by.
    """
    spent: SpentLimit | None = None
    """The budget that refused a call or cut off the last answer."""


class Transcript:
    """Calls and events of one session."""

    def __init__(self, session_id: str, engine: EngineContext, writer: Writer) -> None:
        self.session_id = session_id
        self.turns = CallTree(engine.rendering)
        self.parse_cache = ParseCache()
        self.writer = writer
        self.several = asyncio.Semaphore(engine.settings.several_sampled)
        """Held by each answer of a request for several while it is sampled."""
        self.sampled_tokens = 0
        self.declares_tools = False
        """Whether any request declared tools, or its harness is known to."""
        self._traffic, self._max_recording = engine.traffic, engine.settings.max_recording

    @property
    def full(self) -> bool:
        """Whether the recording has reached its bound."""
        return self.writer.size > self._max_recording

    def restore(self, calls: Sequence[Call]) -> None:
        """Go on behind calls that were recorded by another process."""
        self.sampled_tokens = sum(len(one.sampled_ids) + one.unreported_tokens for one in calls)
        self.declares_tools = self.declares_tools or any(call.tools for call in calls)
        self.turns.restore(calls)

    def append(self, call: Call, tokens: TokenSequence) -> None:
        """Write a call: a copy into the page cache, which is quicker than asking a thread.

        `tokens` are its ids, prompt and answer.
        """
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        self.writer.append(call, tokens)
        self._traffic.add(call, len(tokens) - len(call.sampled_ids))

    def note(self, kind: RecordedEventKind, detail: str = "", *, call: int | None = None) -> None:
        """Record an event; never fails and never waits for the disk."""
        if self.writer.closed or self.full:
            return
        try:
            self.writer.append_record(RecordedEvent(kind, time.time(), call, detail))
        except CaptureError as error:  # the session's next call reports it to its harness
            _log.error("event not written", path=str(self.writer.path), error=str(error))
