"""The engine, its template and the limits that all model calls of a gateway share."""

import asyncio
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tugline import log
from tugline.chat.engines.base import Feature
from tugline.chat.model_call import FORCING, ChoiceMode, Request
from tugline.chat.templates.rendering import Rendering
from tugline.errors import ContextOverflow, TuglineError, Unsupported
from tugline.gateway.model_call import ModelCall
from tugline.gateway.policy import DEFAULTS, CallSettings, InFlight, check_request
from tugline.gateway.replicas import TokenSource
from tugline.gateway.traffic import Traffic
from tugline.recording.records import Header
from tugline.recording.tokenizer_file import save_tokenizer
from tugline.types import Ids, Session, Task, TraceKind
from tugline.web.engine_http import ModelCard

_log = log.get("gateway")
_VERSION = version("tugline")
_LONG = 6
"""Bytes per token of the window from which a text is unlikely to fit."""
_PIECE = 1 << 14
"""Number of characters that are encoded at once."""
_NO_IDS: Ids = np.empty(0, np.int32)


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
        most = self.settings.max_body
        window = self.card.max_model_len
        if not window or self.rendering is None:
            return most
        return min(most, (1 << 20) + window * self.settings.token_bytes)

    def check_request(self, request: Request, new_bytes: int) -> None:
        """Raise `RequestError` for what this engine and its template cannot answer.

        `new_bytes` is the size of the part that no earlier request has.
        """
        check_request(request, self.upstream.wire.mode, self.upstream.wire.features)
        if self.rendering is None:
            return
        window = self.card.max_model_len
        if window and new_bytes >= _LONG * window:
            self._check_length(request, self.rendering)
        choice = request.tool_choice
        if choice.mode in FORCING and self.rendering.force_tool_call(choice) is None:
            mode = choice.mode.value
            msg = f"tool_choice={mode!r} is not supported by this model's chat template"
            raise Unsupported(msg, param="tool_choice")

    def _check_length(self, request: Request, rendering: Rendering) -> None:
        """Raise `ContextOverflow` if the text is much longer than the window.

        The text is encoded in pieces until its length exceeds the window, which bounds the cost.
        """
        texts = [message.content for message in request.messages]
        texts += [request.prompt] if isinstance(request.prompt, str) else []
        length = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                length += len(rendering.tokenizer.encode(text[start : start + _PIECE])) - 1
                self.remaining_window(length, counted="at least ")

    def force_tool_call(self, request: Request) -> Ids:
        """Return the ids, after the prompt, that force the tool call of a request; often none."""
        rendering = self.rendering
        forced = None if rendering is None else rendering.force_tool_call(request.tool_choice)
        return _NO_IDS if forced is None else forced

    def count_prompt(self, call: ModelCall) -> int:
        """Count the ids of a prompt, and those that force a tool call."""
        return len(call.prompt.tokens) + len(self.force_tool_call(call.request))

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
                f"the prompt has {counted}{length} tokens, which leaves none for the answer: "
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
        rendering = self.rendering
        wire = self.upstream.wire
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
    return TuglineError(
        f"internal error of the gateway ({type(error).__name__}); its log has the traceback"
    )
