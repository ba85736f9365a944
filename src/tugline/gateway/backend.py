"""What every call of a gateway is answered with: engine, template, and the gate before both."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from tugline.chat.templates.rendering import Rendering
from tugline.gateway.replicas import ModelCard, TokenSource
from tugline.histogram import MOMENTS, Distribution
from tugline.recording.folder import keep_tokenizer
from tugline.recording.records import Header
from tugline.types import Call, Mode, Session, Task


class InFlight(Protocol):
    """An answer that is being sampled."""

    @property
    def sending(self) -> bool:
        """Whether the engine has been asked and has not finished."""
        ...

    async def abort(self) -> None:
        """Ask the engine to end it where it is."""
        ...


@dataclass(slots=True)
class Traffic:
    """Model calls that were recorded, added up."""

    calls: Counter[str] = field(default_factory=Counter)
    """By what became of the answer (`Outcome`)."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were answered by an error, by its class."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    first_token_s: Distribution = field(default_factory=lambda: Distribution(MOMENTS))
    """From the request to the first token."""
    answer_s: Distribution = field(default_factory=Distribution)
    """From the request to the last token."""

    def add(self, call: Call) -> None:
        """One more."""
        times = call.timings
        self.calls[call.outcome] += 1
        self.prompt_tokens += len(call.prompt_ids)
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        if times.first_token is not None and times.last_token is not None:
            self.first_token_s.add(times.first_token - times.received)
            self.answer_s.add(times.last_token - times.received)


@dataclass(slots=True)
class EngineContext:
    """What answers are made with, and whether they may be made now."""

    upstream: TokenSource
    card: ModelCard
    rendering: Rendering | None
    tokenizer: str = ""
    """SHA-256 of the tokenizer's file, once it is kept beside the recordings."""
    version: int = 0
    """Of the weights, as announced; for engines that do not say it themselves."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[InFlight] = field(default_factory=set)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def mode(self) -> Mode:
        """Who makes the prompt's ids."""
        return self.upstream.wire.mode

    def keep_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer beside the recordings in `folder`, so that they stay readable."""
        if self.rendering is not None:
            self.tokenizer = keep_tokenizer(self.rendering.tokenizer, folder)

    def header(self, session: Session, task: Task, workdir: str, home: str) -> Header:
        """What a recording begins with."""
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
