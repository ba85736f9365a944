"""Parameters of clients' requests: pages, filters and cursors."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.protocol.clients import DeliveryState, Name, TaskState
from tugline.protocol.runs import FigureName
from tugline.types import Status

Limit = Annotated[int, Meta(ge=1, le=1000, description="Maximum number of items.")]
Wait = Annotated[float, Meta(ge=0, le=60.0, description="Seconds to wait for new items.")]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Cursor = Annotated[str, Meta(max_length=256, description="`next` of the previous page.")]


class PageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a page of a list."""

    newest: bool = False
    """Start with the most recently submitted."""
    after: Cursor | None = None
    limit: Limit = 100


class TaskQuery(PageQuery, frozen=True, kw_only=True):
    """Filter of a list of tasks."""

    state: TaskState | None = None
    """Only open tasks, or only released tasks."""
    tenant: Annotated[str, Meta(max_length=64)] | None = None
    """Only tasks of this tenant."""
    tag: Annotated[str, Meta(max_length=1200, pattern="^[^=]+=")] | None = None
    """Only tasks with this tag, ``key=value``."""
    run: Name | None = None
    """Only tasks of this run."""


class SessionOrder(StrEnum):
    """Order of sessions by a number that ended sessions have."""

    HIGHEST = "highest"
    LOWEST = "lowest"
    LONGEST = "longest"
    SHORTEST = "shortest"


class SessionQuery(PageQuery, frozen=True, kw_only=True):
    """Filter of a list of sessions."""

    task: Name | None = None
    """Only sessions of this task."""
    status: Status | None = None
    """Only sessions with this status."""
    node: Annotated[str, Meta(max_length=160)] | None = None
    """Only sessions leased to this node."""
    run: Name | None = None
    """Only sessions of this run."""
    q: Annotated[str, Meta(max_length=160)] = ""
    """Search text: part of the session's id, or words (prefixes match, too) that all occur in the
    instruction and tags of its task, or in its failure and note."""
    min_reward: float | None = None
    """Only sessions with at least this reward."""
    max_reward: float | None = None
    """Only sessions with at most this reward."""
    order: SessionOrder | None = None
    """By reward, only sessions with one, or by the seconds of all stages; `q` and `newest` do not
    apply."""
    recent: bool = False
    """Only sessions that have started, the last changed first; `q` and `newest` do not apply."""


class LogQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Range of a log, and whether to follow it."""

    offset: Position = 0
    """Byte offset to start at."""
    tail: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    """Start this many bytes before the end instead."""
    follow: bool = False
    """Continue until the session ends."""


class StepQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Range of the steps of a run."""

    after: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1
    """Only steps after this step."""
    limit: Limit = 1000
    figure: Annotated[tuple[FigureName, ...], Meta(max_length=100)] = ()
    """Only these figures, without notes, and only steps that have any of them."""


class ResultQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of results."""

    consumer: Name | None = None
    """Start after the acknowledged position of this consumer."""
    after: Position | None = None
    """Start after this position instead."""
    limit: Limit = 100
    wait_s: Wait = 0.0
    task: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    """Only results of these tasks."""
    run: Name | None = None
    """Only results of this run."""
    groups: bool = False
    """Return whole groups, once they are released."""


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of events."""

    after: Position | None = None
    """Start after this position (default: a page at the first event, a stream at new events)."""
    limit: Limit = 100
    wait_s: Wait = 0.0
    task: Name | None = None
    """Only events of this task."""


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of webhook deliveries."""

    state: DeliveryState | None = None
    """Only deliveries in this state."""
    after: Position = 0
    """Start after this id."""
    limit: Limit = 100


class StatusQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the server's status."""

    details: bool = False
    """Also count `Counts.queue` and `Counts.unread`, which reads the queue and new results."""
