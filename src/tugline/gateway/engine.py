"""State shared by model calls: the engine and its template, and a session's recording.

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
from tugline.chat.model_call import FORCING, ChoiceMode, Request
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokens import TokenSequence
from tugline.errors import CaptureError, ContextOverflow, TuglineError, Unsupported, UsageError
from tugline.gateway.policy import DEFAULTS, CallSettings, InFlight
from tugline.gateway.prefix import CallTree
from tugline.gateway.replicas import TokenSource
from tugline.histogram import MOMENTS, Distribution
from tugline.recording.file import Writer
from tugline.recording.records import Header, RecordedEvent, RecordedEventKind
from tugline.recording.tokenizer_file import save_tokenizer
from tugline.types import Call, Failure, LogprobMeaning, Mode, Session, SpentLimit, Task, TraceKind
from tugline.web.engine_http import ModelCard


@dataclass(slots=True)
class Traffic:
    """Counters of all recorded model calls."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls by `CallOutcome`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of requests answered with an error, by its class."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    first_token_s: Distribution = field(default_factory=lambda: Distribution(MOMENTS))
    """Seconds from the request to the first token."""
    answer_s: Distribution = field(default_factory=Distribution)
    """Seconds from the request to the last token."""

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
        """Return the sum of `parts`."""
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
_VERSION = version("tugline")
_LONG = 6
"""Bytes per token of the window from which a text is unlikely to fit."""
_PIECE = 1 << 14
"""Number of characters that are encoded at once."""


@dataclass(slots=True)
class EngineContext:
    """The engine, its template and the limits that all calls of a gateway share."""

    upstream: TokenSource
    card: ModelCard
    rendering: Rendering | None
    """Renderer of prompts; None in observed and text mode."""
    settings: CallSettings = DEFAULTS
    tokenizer: str = ""
    """SHA-256 of the tokenizer file beside the recordings; empty until it is stored."""
    version: int = 0
    """Announced version of the weights, for engines that do not report their own."""
    traffic: Traffic = field(default_factory=Traffic)
    bytes_in_flight: InFlight = field(init=False)
    """Bytes of request bodies in flight, of all sessions."""
    answers_in_flight: InFlight = field(init=False)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Held while a large request is parsed and rendered in a thread."""

    def __post_init__(self) -> None:
        self.bytes_in_flight = InFlight("request bytes", self.settings.gateway_bytes)
        self.answers_in_flight = InFlight("answers", self.settings.gateway_answers)

    @property
    def max_body(self) -> int:
        """Maximum request size in bytes; in exact mode also bounded by the window."""
        most, window = self.settings.max_body, self.card.max_model_len
        if not window or self.rendering is None:
            return most
        return min(most, (1 << 20) + window * self.settings.token_bytes)

    def check_length(self, request: Request, new_bytes: int) -> None:
        """Raise `ContextOverflow` if the text is much longer than the window.

        The text is encoded in pieces until its length exceeds the window, which bounds the cost.
        Bodies with too few `new_bytes` to fill the window are not encoded.
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
        if rendering is None or choice.mode not in FORCING:
            return
        if rendering.force_tool_call(choice) is None:
            mode = choice.mode.value
            msg = f"tool_choice {mode!r} cannot be honoured with this model's template"
            raise Unsupported(msg, param="tool_choice")

    def count_prompt(self, request: Request, prompt: TokenSequence) -> int:
        """Count the ids of a prompt, and those that force a tool call."""
        rendering = self.rendering
        forced = None if rendering is None else rendering.force_tool_call(request.tool_choice)
        return len(prompt) + (0 if forced is None else len(forced))

    def find_banned(self, request: Request) -> tuple[int, ...]:
        """Return the ids that must not be sampled: those that open forbidden tool calls.

        None where the engine or the template cannot ban calls. A compaction is sampled freely,
        because a summary under a ban could not be trained.
        """
        forbidden = request.tool_choice.mode is ChoiceMode.NONE and bool(request.tools)
        if self.rendering is None or not forbidden or request.thread.kind is TraceKind.COMPACTION:
            return ()
        opening = self.rendering.markers.call
        can_ban = Feature.BAN in self.upstream.wire.features and opening >= 0
        return (opening,) if can_ban else ()

    def is_constrained(self, request: Request) -> bool:
        """Whether the answer is sampled under a ban, a grammar, or the engine's forced choice."""
        forced = self.rendering is None and request.tool_choice.mode in FORCING
        return forced or request.constraint is not None or bool(self.find_banned(request))

    def remaining_window(self, length: int, *, counted: str = "") -> int | None:
        """Return the tokens that a prompt of `length` leaves for an answer; None if unknown.

        `counted` qualifies the length, such as "at least ".

        Raises `ContextOverflow` if none are left.
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
        """Wait while calls are paused. Raises `EngineError` after `pause_timeout_s`."""
        await self.upstream.gate.wait(self.settings.pause_timeout_s)

    def keep_tokenizer(self, folder: Path) -> None:
        """Store the tokenizer in `folder`, because reading the recordings there needs it."""
        if self.rendering is not None:
            self.tokenizer = save_tokenizer(self.rendering.tokenizer, folder)

    def header(self, session: Session, task: Task, workdir: str, home: str) -> Header:
        """Create the first record of a session's recording."""
        rendering, wire = self.rendering, self.upstream.wire
        return Header(
            session=session,
            task=task,
            created=time.time(),
            tugline=_VERSION,
            model=self.card.id,
            window=self.card.max_model_len,
            engine=wire.name,
            mode=wire.mode,
            template=rendering.name if rendering else "",
            **(rendering.options if rendering else {}),
            tokenizer=self.tokenizer,
            workdir=workdir,
            home=home,
            forked_from=self.upstream.forked_from,
        )


def explain(error: Exception) -> TuglineError:
    """Return the error to send to a client; an unexpected one is logged and wrapped.

    Its text is not passed on, because it may hold contents.
    """
    if isinstance(error, TuglineError):
        return error
    _log.error("gateway failed", traceback=log.describe_error(error))
    return TuglineError(f"the gateway failed ({type(error).__name__}); its log has the place")


# --------------------------------------------------------------------------- reports
class CheckOutcome(StrEnum):
    """Result of a check."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The result could not be determined."""


class ProbeCheck(msgspec.Struct, frozen=True):
    """A check of an engine and its outcome."""

    name: str
    outcome: CheckOutcome
    detail: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of an engine, and advice on its settings."""

    url: str
    engine: str
    """Kind of engine, a key of `ROUTES`."""
    version: str = ""
    model: str
    window: int
    """Context length in tokens, prompt and answer together; 0 if not reported."""
    routes: dict[str, Mode]
    """Working routes and their modes, best first."""
    logprob_meaning: LogprobMeaning | None = None
    """None if it could not be measured."""
    checks: tuple[ProbeCheck, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def mode(self) -> Mode | None:
        """Best working mode; None if no route works."""
        return next(iter(self.routes.values()), None)

    @property
    def sound(self) -> bool:
        """Whether the engine's samples have token ids."""
        return self.mode in {Mode.EXACT, Mode.OBSERVED}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with `mode` and `sound`."""
        return {**msgspec.structs.asdict(self), "mode": self.mode, "sound": self.sound}

    def wire(self, mode: Mode | None = None) -> EngineFormat:
        """Return the format for `mode`, or the best one. Raises `UsageError` if none works."""
        for name, working in self.routes.items():
            if working is mode or (mode is None and working is not Mode.TEXT):
                return ROUTES[self.engine][name](self.logprob_meaning)
        wanted = f"no sound {mode} mode" if mode else "no mode that can be trained from"
        failed = [f"{c.name}: {c.detail}" for c in self.checks if c.outcome == "fail"]
        advice = "; ".join([*failed[:1], *self.advice]) or "see `tugline doctor`"
        msg = f"the engine at {self.url} ({self.engine} {self.version}) has {wanted}: {advice}"
        raise UsageError(msg)


# --------------------------------------------------------------------------- sessions
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """Properties of a session's harness and sandbox that its gateway needs."""

    spent_status: int = 400
    """HTTP status of a refusal for a spent budget: the one on which the harness stops."""
    offers_tools: bool = False
    """Whether the harness declares tools in its main calls; a call without is a side call."""
    workdir: str = ""
    """Working folder in the sandbox, recorded for a replay."""
    home: str = ""
    """Home folder in the sandbox, recorded for a replay."""
    key: str = ""
    """Session key issued by an earlier process; the session continues from its recording."""


DEFAULT_TERMS = SessionTerms()
"""Terms for an unknown harness."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Address and key of an open session."""

    base_url: str
    """URL without ``/v1``; each harness appends the suffix that its CLI expects."""
    key: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """State of a live session, or final state of a closed one."""

    path: Path
    """Path of the recording."""
    failure: Failure | None = None
    """Reason why the last call failed, if the cause was the engine or its window.

    A session that exceeds the window later has answers that can be evaluated.
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
        """Held by each answer of a request with ``n`` > 1 while it is sampled."""
        self.calls = 0
        """Number of recorded calls."""
        self.sampled_tokens = 0
        self.declares_tools = False
        """Whether a request declared tools, or the harness is known to declare them."""
        self._traffic, self._max_recording = engine.traffic, engine.settings.max_recording

    @property
    def full(self) -> bool:
        """Whether the recording has reached its size limit."""
        return self.writer.size > self._max_recording

    def restore(self, calls: Sequence[Call]) -> None:
        """Continue after calls that another process recorded."""
        self.calls = len(calls)
        self.sampled_tokens = sum(len(c.sampled_ids) + c.unreported_tokens for c in calls)
        self.declares_tools = self.declares_tools or any(call.tools for call in calls)
        self.turns.restore(calls)

    def append(self, call: Call, tokens: TokenSequence) -> None:
        """Write a call. This copies into the page cache, which is faster than using a thread.

        `tokens` are the ids of prompt and answer.
        """
        self.writer.append(call, tokens)
        self.calls += 1
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        self._traffic.add(call, len(tokens) - len(call.sampled_ids))

    def note(self, kind: RecordedEventKind, detail: str = "", *, call: int | None = None) -> None:
        """Record an event; never fails and never waits for the disk."""
        if self.writer.closed or self.full:
            return
        try:
            self.writer.append_record(RecordedEvent(kind, time.time(), call, detail))
        except CaptureError as error:  # the session's next call reports it to its harness
            _log.error("event not written", path=str(self.writer.path), error=str(error))
