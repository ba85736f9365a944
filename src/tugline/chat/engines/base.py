"""The contract of an engine's wire format: build a request, read tokens back. Pure, no I/O.

A format either takes ids (exact mode) or messages (observed mode: the engine renders and tells its
ids; text mode: it tells none). The gateway decodes ids into text itself in exact mode; in the other
two the engine's own text, reasoning and tool calls are told on.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from tugline.chat.request import Constraint, Request, ToolChoice
from tugline.chat.tokens import TokenSequence
from tugline.errors import TuglineError
from tugline.types import (
    Call,
    Finish,
    Ids,
    LogprobMeaning,
    Logprobs,
    Message,
    Mode,
    Sampling,
    Tool,
    VersionSpan,
)

NO_IDS: Ids = np.empty(0, np.int32)
NO_LOGPROBS: Logprobs = np.empty(0, np.float32)


class Feature(StrEnum):
    """What an engine can do beyond drawing tokens."""

    STRUCTURED = "structured"
    """Constrained decoding (`EngineRequest.constraint`)."""
    IMAGES = "images"
    BAN = "ban"
    """Never draw given ids (`EngineRequest.banned`)."""
    TOOL_CHOICE = "tool_choice"
    """Observed mode: forced tool choice."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to sample. Exactly one of `prompt` and `messages` is given."""

    model: str
    sampling: Sampling
    """Enforced; ``top_k`` 0 or None is off. ``stop`` matters in observed and text mode only."""
    request_id: str
    """Unique; what an abort names."""
    stream: bool = True
    prompt: TokenSequence | None = None
    stop_ids: tuple[int, ...] = ()
    """Sampled and then final, in exact mode."""
    banned: tuple[int, ...] = ()
    """Ids that may not be drawn, in exact mode."""
    constraint: Constraint | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel: bool = True
    request: Request | None = None
    """What the harness asked, for a source that answers from a recording; no engine is told."""


class Post(msgspec.Struct, frozen=True):
    """One HTTP request to the engine."""

    path: str
    body: bytes
    headers: dict[str, str] = {}


class CallDelta(msgspec.Struct, frozen=True):
    """A part of a tool call as an observed engine streams it."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens sampled under one policy version, and what else came with them."""

    ids: Ids = NO_IDS
    logprobs: Logprobs = NO_LOGPROBS
    version: int | None = None
    """None where the engine does not say; the gateway then uses the announced one."""
    spans: tuple[VersionSpan, ...] = ()
    """Versions of the whole reply so far, counted from its first token, where an engine tells them
    late; they override `version`."""
    finish: Finish | None = None
    """Comes with the last."""
    prompt: bytes | None = None
    """Observed mode: the prompt's ids as raw JSON array, as the engine wrote it."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    stop: str | None = None
    """Observed and text mode: the stop string that matched."""
    unreported_tokens: int = 0
    """Sampled tokens whose ids are not told (yet), by the engine's own count; negative where an
    earlier count was too high or the ids came after all."""
    prompt_count: int = 0
    """Text mode: prompt tokens by the engine's own count."""
    replayed: Call | None = None
    """The recorded call that this is the answer of, where nothing was sampled."""


class Reader(Protocol):
    """Reads one reply; keeps what it must between chunks."""

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """Payloads of server-sent events (what follows ``data:``, without ``[DONE]``).

        All that came in one read are given together; consecutive tokens of one version are one
        `Delta`. Raises `EngineError` on nonsense, or when ids that must be there are missing,
        naming the engine flag to add.
        """
        ...

    def read_body(self, body: bytes) -> list[Delta]:
        """A reply that was not streamed."""
        ...


class EngineFormat(Protocol):
    """Everything the gateway knows about one way of talking to one kind of engine."""

    name: str
    """Such as ``vllm``."""
    mode: Mode
    logprob_meaning: LogprobMeaning
    features: frozenset[Feature]

    def build_request(self, request: EngineRequest) -> Post:
        """The request; streaming if ``request.stream``."""
        ...

    def make_reader(self, request: EngineRequest) -> Reader:
        """A fresh reader for the reply to `request`."""
        ...

    def build_abort(self, request_id: str) -> Post | None:
        """Ask the engine to end a request and answer with what there is; None if it cannot."""
        ...

    def parse_error(self, status: int, body: bytes, retry_after: str | None) -> TuglineError:
        """The engine's own words: `ContextOverflow` for a prompt too long, else `EngineError`."""
        ...
