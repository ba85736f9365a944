"""The engine and template that all calls of a gateway share, and the gate that pauses them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tugline.chat.engines.base import Feature
from tugline.chat.request import ChoiceMode, Request
from tugline.chat.templates.rendering import Rendering
from tugline.errors import ContextOverflow, EngineError, Unsupported
from tugline.gateway.policy import check_request
from tugline.gateway.replicas import TokenSource
from tugline.gateway.settings import DEFAULTS, CallSettings
from tugline.histogram import MOMENTS, Distribution
from tugline.recording.folder import save_tokenizer
from tugline.recording.records import Header
from tugline.types import Call, Mode, Session, Task
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

    def add(self, call: Call) -> None:
        """Count a recorded call."""
        times = call.timings
        self.calls[call.outcome] += 1
        self.prompt_tokens += len(call.prompt_ids)
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        if times.first_token is not None and times.last_token is not None:
            self.first_token_s.add(times.first_token - times.received)
            self.answer_s.add(times.last_token - times.received)


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

    @property
    def mode(self) -> Mode:
        """Who makes the prompt's ids."""
        return self.upstream.wire.mode

    def check_request(self, request: Request) -> None:
        """Raise `RequestError` naming what engine or template cannot honour."""
        check_request(request, self.mode, self.upstream.wire.features)

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

    def remaining_window(self, length: int) -> int | None:
        """Tokens that a prompt of `length` leaves for an answer; None if only the engine knows.

        Raises `ContextOverflow` if there are none.
        """
        window = self.card.max_model_len
        if not window or self.rendering is None:
            return None
        if window - length < 1:
            msg = (
                f"the prompt has {length} tokens and leaves no room to answer: "
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
        rendering = self.rendering
        return Header(
            session=session,
            task=task,
            created=time.time(),
            tugline=version("tugline"),
            model=self.card.id,
            window=self.card.max_model_len,
            engine=self.upstream.wire.name,
            mode=self.mode,
            template=rendering.name if rendering else "",
            thinking_retention=rendering.thinking_retention if rendering else "",
            tokenizer=self.tokenizer,
            workdir=workdir,
            home=home,
            forked_from=self.upstream.forked_from,
        )
