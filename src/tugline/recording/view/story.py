"""What there is to see of a session: the one value that every view of it shows.

The terminal, the HTML page and ``--json`` all show this value, so they cannot disagree; its fields
are the documented shape of the JSON (see `docs/view.md`). `tugline.recording.view.session_view`
makes it from a recording.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from tugline.recording.records import EventKind, Header, Result
from tugline.types import (
    CallOutcome,
    Finish,
    Ledger,
    Message,
    Sampling,
    Span,
    TraceKind,
    VersionSpan,
)


class How(StrEnum):
    """How a turn's prompt goes on from its parent."""

    FIRST = "first"
    """It has no parent."""
    EXACT = "exact"
    """It begins with all of the parent's ids."""
    HEALED = "healed"
    """The same, although the harness wrote the parent's answer in another way."""
    FORKED = "forked"
    """It leaves the parent's ids before their end."""
    TEXT = "text"
    """The engine told no ids, so nobody knows."""


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What was said in a turn; only in the turn that was asked for, or in all with ``--full``."""

    messages: tuple[Message, ...]
    """What the request added to its parent's conversation; all of it in a first or forked turn."""
    answer: Message | None
    """What the harness was told; null if that was nothing."""
    sampling: Sampling
    asked: Sampling
    """What the harness wished, where that differs from `sampling`."""
    offered: tuple[str, ...]
    """Names of the tools that the model could call."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. Times are seconds, `at` since the session began; null: it never came."""

    call: int
    kind: TraceKind
    thread: str | None
    parent: int | None
    how: How
    why: tuple[str, ...]
    """What was healed, or why it forked: a reason of `Branch`, ``broken_off`` where the harness
    went on from a part of an answer that it hung up on, ``unrecorded`` where the record does not
    say that the ids differ."""
    prompt: int
    reused: int
    """Leading prompt ids that are the parent's: its prompt and its answer."""
    sampled: int
    mean_logprob: float | None
    finish: Finish
    stop: str | None
    outcome: CallOutcome
    versions: tuple[VersionSpan, ...]
    at: float
    first_token_s: float | None
    total_s: float | None
    tools: tuple[str, ...]
    """Names of the tools that the answer calls, in order."""
    images: int
    replicas: tuple[str, ...]
    constrained: bool
    """Whether a grammar or a ban held the answer."""
    replayed: bool
    """Told from another session's recording."""
    trace: int | None
    """The trace that has its answer; null if none has."""
    ledger: Ledger
    detail: Detail | UnsetType = UNSET


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event between the turns; `at` in seconds since the session began."""

    kind: EventKind
    at: float
    call: int | None
    detail: str


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """A trace token by token; null where nothing was sampled. Only with ``--full``."""

    ids: list[int]
    trained: list[bool]
    logprobs: list[float | None]
    calls: list[int | None]
    versions: list[int | None]


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to train on."""

    index: int
    kind: TraceKind
    parent: int | None
    shared: int
    """Leading ids that are the parent's."""
    thread: str | None
    exact: bool
    length: int
    trained: int
    spans: tuple[Span, ...]
    """What was sampled; everything else is context."""
    images: tuple[str, ...]
    tokens: Tokens | UnsetType = UNSET


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session."""

    recording: str
    """Path of the file."""
    damage: str
    """Why the end of the file could not be read; empty if all of it was."""
    torn_bytes: int
    """Length of a record at the end that was cut off."""
    started: float
    """Unix seconds, from which the times of turns and events count."""
    header: Header | None
    """As recorded, without the task's files; null where the first record is lost."""
    result: Result | None
    """As recorded; null as long as there is none."""
    turns: tuple[Turn, ...]
    events: tuple[TimelineEvent, ...]
    builder: str
    unbuilt: str
    """Why there are no traces; empty if there are."""
    traces: tuple[TraceView, ...]
    ledger: Ledger
