"""Messages of clients: tasks, sessions, results, events, webhooks, problems."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.types import TERMINAL, Failure, Status

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]
"""Name of a run or a consumer, or id of a task or a session."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgement that a task is stored durably."""

    task: str
    sessions: tuple[str, ...]
    new: bool
    """False if the same task was submitted before."""


class TaskState(StrEnum):
    """Whether a task still has sessions to finish."""

    OPEN = "open"
    RELEASED = "released"
    """All its sessions are final."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a task."""

    id: str
    tenant: str
    priority: int
    state: TaskState
    samples: int
    created: float
    counts: dict[str, int]
    """Sessions by status; statuses without sessions are left out."""
    usable: int
    """Sessions with a reward."""
    missing: tuple[int, ...] = ()
    """Samples without a usable result, once the task is released."""
    reason: str = ""
    """Reason for an early close: ``min_usable``, ``deadline`` or ``cancelled by ...``."""
    released: int | None = None
    """Position of the release event; a later one once a reward of the task has changed."""
    tags: dict[str, str] = {}
    run: str | None = None
    """Run that it belongs to."""
    judges: str | None = None
    """Recorded session that it judges again."""

    @property
    def finished(self) -> int:
        """Sessions that are final."""
        return sum(self.counts.get(status, 0) for status in TERMINAL)


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a session."""

    id: str
    task: str
    sample: int
    attempt: int
    epoch: int
    status: Status
    node: str | None
    version: int
    """Version of the weights when it was leased."""
    created: float
    updated: float
    stopping: str = ""
    """Originator of a pending request to stop the session; empty if there is none."""
    note: str = ""
    """Note of a person."""
    run: str | None = None
    """Run that it belongs to."""
    judges: str | None = None
    """Recorded session that it judges again."""


class SessionNote(msgspec.Struct, frozen=True, kw_only=True):
    """A note on a session."""

    text: Annotated[str, Meta(max_length=2000, pattern="^[^\\x00]*$")]
    """Empty: no note."""


class ResultView(msgspec.Struct, frozen=True, kw_only=True):
    """Result without tokens, which are in the `Trajectory`."""

    position: int
    session: str
    task: str
    tenant: str
    sample: int
    attempt: int
    status: Status
    version: int | None = None
    """Version of the weights when it was leased; None in results of older releases."""
    reward: float | None
    failure: Failure | None
    sampled: int
    """Sampled tokens."""
    trained: int
    bytes: int
    """Size of the encoded, compressed trajectory; 0 for a session that never ran."""
    seconds: dict[str, float]
    created: float
    engine_s: float | None = None
    """Seconds in which at least one of its model calls was at the engine; None in results of older
    releases."""
    prompt_tokens: int | None = None
    """Tokens of the prompts of its model calls; None in results of older releases."""
    queued_s: float | None = None
    """Seconds in the queue, before all attempts; None in results of older releases."""
    other_s: float | None = None
    """Seconds of earlier attempts, and of the last one outside INIT, READY, RUN and EVAL; None in
    results of older releases."""
    node: str | None = None
    """Node that ran it last; None if it never ran."""
    patch: str = ""
    """SHA-256, in hex, of what the agent changed, stored beside its recording; empty if it ended
    before, and in results of older releases."""
    run: str | None = None
    """Run that it belongs to."""
    judges: str | None = None
    """Recorded session that it judges again; only consumers that ask for its task or run get it."""
    revision: int = 0
    """Number of times that another verdict has changed the reward, each time at a new position."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a list; `next` is the cursor of the next page, None on the last one."""

    tasks: tuple[TaskView, ...] = ()
    sessions: tuple[SessionView, ...] = ()
    results: tuple[ResultView, ...] = ()
    """Results of the finished sessions in `sessions`."""
    next: str | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the server's state."""

    sessions: dict[str, int]
    """Sessions by status."""
    tasks_open: int
    nodes: int
    """Live nodes."""
    slots: int
    """Sessions that the live nodes can run at the same time."""
    position: int
    """Position of the latest event."""
    version: int
    """Version of the weights."""
    paused: bool
    dead_deliveries: int
    queue: dict[str, int] = {}
    """Queued sessions by tenant; counted on request."""
    unread: dict[str, int] = {}
    """Results after the position of each consumer; counted on request, up to 100,000."""
    engines: dict[str, bool] = {}
    """Engines of a node in the server's process, by URL: whether each answers and reports its
    load."""
    disk_low: bool = False
    """Whether such a node takes no work because its disk is nearly full."""


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a cancellation."""

    ended: tuple[str, ...]
    """Sessions that had not started and are now CANCELLED."""
    stopping: tuple[str, ...]
    """Running sessions, whose nodes will stop them."""
    final: int
    """Sessions that were already final."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of their commits, or whole groups in the order of their release."""

    items: tuple[ResultView, ...]
    groups: tuple[TaskView, ...] = ()
    """Groups that `items` belong to, if whole groups were requested."""
    cursor: int
    """Position to acknowledge once the items are stored; the next request starts after it."""


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """Reader of results, with its acknowledged position."""

    name: str
    acked: int
    updated: float


class Ack(msgspec.Struct, frozen=True):
    """Acknowledgement of everything up to `cursor`."""

    cursor: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class EventKind(StrEnum):
    """Kinds of events at ``/v1/events``."""

    ACCEPTED = "task.accepted"
    RELEASED = "task.released"
    LEASED = "session.leased"
    REQUEUED = "session.requeued"
    STOPPING = "session.stopping"
    RESULT = "session.result"
    REVISED = "session.revised"
    NOTED = "session.noted"
    JOINED = "node.joined"
    DRAINING = "node.draining"
    LOST = "node.lost"
    BLOCKED = "node.blocked"
    VERSION = "weights.version"
    PAUSED = "weights.paused"
    RESUMED = "weights.resumed"
    STARTED = "run.started"
    ENDED = "run.ended"
    STEP = "run.step"
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
    """Given up after the last try; stored until it is retried manually."""


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
    """Error of the last try."""


class WebhookBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a callback: a result, or a group when it is released."""

    id: str
    """The same on every retry, and equal to the header ``webhook-id``."""
    delivery: int
    """Id of the delivery in the outbox."""
    kind: EventKind
    task: str
    result: ResultView | None = None
    group: TaskView | None = None


# --------------------------------------------------------------------------- problems
PROBLEM = "urn:tugline:problem:"
"""Prefix of `Problem.type`; an error without it is not from a Tugline server."""


class FieldError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Error in a field of a request."""

    detail: str
    """Message with the field, its value and the accepted values."""
    field: str = ""
    """Path of the invalid field, such as ``0.limits.agent_s``."""
    known: tuple[str, ...] = ()
    """Accepted values, if they are a list."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Error body, RFC 9457; `field` and `known` are copied from the first of `errors`."""

    type: str
    """``urn:tugline:problem:<name>``; docs/api.md lists the names."""
    title: str
    status: int
    detail: str
    field: str = ""
    """Path of the invalid field, such as ``0.limits.agent_s``."""
    known: tuple[str, ...] = ()
    """Accepted values, if they are a list."""
    errors: tuple[FieldError, ...] = ()
    """Errors of a request with invalid fields (422), at most 50."""
