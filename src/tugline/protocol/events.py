"""Events, and the webhooks that deliver some of them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tugline.protocol.results import ResultView
from tugline.protocol.tasks import TaskView


class EventKind(StrEnum):
    """Kinds of events at ``/v1/events``."""

    ACCEPTED = "task.accepted"
    RELEASED = "task.released"
    LEASED = "session.leased"
    REQUEUED = "session.requeued"
    STOPPING = "session.stopping"
    RESULT = "session.result"
    JOINED = "node.joined"
    DRAINING = "node.draining"
    LOST = "node.lost"
    VERSION = "weights.version"
    PAUSED = "weights.paused"
    RESUMED = "weights.resumed"
    DEAD = "delivery.dead"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A committed change of state."""

    position: int
    kind: EventKind
    created: float
    task: str | None = None
    session: str | None = None
    node: str | None = None
    detail: dict[str, str | int | float] = {}


class DeliveryState(StrEnum):
    """State of a webhook delivery."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"
    """Given up; kept until it is retried by hand."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook delivery in the outbox. `id` is its idempotency key."""

    id: int
    task: str
    kind: EventKind
    """``session.result`` or ``task.released``."""
    url: str
    state: DeliveryState
    tries: int
    next_try: float
    error: str = ""
    """Of the last try."""


class WebhookBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a callback: a result, or a group when it is released."""

    id: str
    """The same on every retry, and equal to the header ``webhook-id``."""
    delivery: int
    """Its number in the outbox."""
    kind: EventKind
    task: str
    result: ResultView | None = None
    group: TaskView | None = None
