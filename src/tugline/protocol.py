"""What server, nodes and clients say to each other: the bodies of the API under ``/v1``.

Every value here is a frozen struct, so one definition serves the HTTP bodies, their OpenAPI schema
and the calls inside one process. Times are Unix seconds, durations seconds. A `position` counts
what happened, in the order in which it was committed; it never repeats and never goes back, so
"after position N" is a cursor that survives every restart (I3).

`Dispatcher` is all that a node needs of a server, over HTTP or in the same process.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from tugline.types import Boundary, Failure, Session, Status, Task

LEASE_WAIT_S = 30.0
"""How long a question may wait for its answer, unless it says otherwise."""


# --------------------------------------------------------------------------- tasks and sessions
class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A task is kept durably."""

    task: str
    sessions: tuple[str, ...]
    new: bool
    """False when the same task was there already."""


class TaskState(StrEnum):
    """Whether anything may still happen to a task."""

    OPEN = "open"
    RELEASED = "released"
    """All its sessions are final."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task as it stands."""

    id: str
    tenant: str
    priority: int
    state: TaskState
    samples: int
    created: float
    counts: dict[str, int]
    """Sessions by status; those that are 0 are left out."""
    usable: int
    """Sessions with a reward."""
    missing: tuple[int, ...] = ()
    """Samples without a usable result, once it is released."""
    why: str = ""
    """What released it early: ``enough``, ``deadline`` or ``cancelled by ...``."""
    released: int | None = None
    """Position of its release."""
    tags: dict[str, str] = {}


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it stands."""

    id: str
    task: str
    sample: int
    attempt: int
    epoch: int
    status: Status
    node: str | None
    version: int
    """Newest weights when it was leased."""
    created: float
    updated: float
    stopping: str = ""
    """Who asked it to stop, while it has not yet."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a list; `next` is the cursor of the rest, None at the end."""

    tasks: tuple[TaskView, ...] = ()
    sessions: tuple[SessionView, ...] = ()
    next: str | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The whole at a glance."""

    sessions: dict[str, int]
    """By status."""
    tasks_open: int
    nodes: int
    """Live ones."""
    slots: int
    """Sessions that the live nodes may run at once."""
    position: int
    """The latest."""
    version: int
    """Of the weights."""
    paused: bool
    dead_deliveries: int


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """What a cancellation met."""

    ended: tuple[str, ...]
    """Sessions that had not started, and now are CANCELLED."""
    stopping: tuple[str, ...]
    """Sessions that run: their nodes are told to stop them."""
    final: int
    """Sessions that were over before."""


# --------------------------------------------------------------------------- results and events
class ResultView(msgspec.Struct, frozen=True, kw_only=True):
    """A result without its tokens, which `Trajectory` has."""

    position: int
    session: str
    task: str
    tenant: str
    sample: int
    attempt: int
    status: Status
    reward: float | None
    failure: Failure | None
    sampled: int
    """Tokens."""
    trained: int
    bytes: int
    """Of the encoded, compressed trajectory; 0 for a session that never ran."""
    seconds: dict[str, float]
    created: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of their commits, or whole groups in the order of their release."""

    items: tuple[ResultView, ...]
    groups: tuple[TaskView, ...] = ()
    """Where whole groups were asked for: those that `items` belong to."""
    cursor: int
    """Acknowledge this once the items are safe; the next question starts after it."""


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who reads results, and how far."""

    name: str
    acked: int
    updated: float


class EventKind(StrEnum):
    """What can be followed at ``/v1/events``."""

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
    """Something that happened."""

    position: int
    kind: EventKind
    created: float
    task: str | None = None
    session: str | None = None
    node: str | None = None
    detail: dict[str, str | int | float] = {}


class DeliveryState(StrEnum):
    """How far a callback is."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"
    """Given up; kept until it is sent again by hand."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One callback of the outbox. `id` is its idempotency key."""

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
    """The body of a callback: a result, or a group when it is released."""

    id: str
    """The same each time it is sent, and as in the header ``webhook-id``."""
    delivery: int
    """Its number in the outbox."""
    kind: EventKind
    task: str
    result: ResultView | None = None
    group: TaskView | None = None


# --------------------------------------------------------------------------- nodes
class PauseMode(StrEnum):
    """What becomes of model calls in flight when the weights are about to change."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes have in common; a higher generation replaces a lower one."""

    generation: int = 0
    paused: PauseMode | None = None
    version: int = 0


class NodeRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """A node introduces itself. One of the same name takes the place of its predecessor."""

    name: str
    slots: int
    """Sessions that may be in RUN at once."""
    room: int
    """Sessions it can hold in all stages together."""
    gateway: str = ""
    """URL of its gateway as sandboxes see it."""
    labels: dict[str, str] = {}
    versions: dict[str, str] = {}
    """Of Tugline, of the engine, of its harnesses."""


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """A node is taken in."""

    node: str
    token: str
    """Opens what this node may do, and nothing else."""
    lease_s: float
    """Unless it renews within this time, all its sessions are given to others."""
    control: Control


class NodeState(StrEnum):
    """Whether a node gets work."""

    LIVE = "live"
    DRAINING = "draining"
    GONE = "gone"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the server knows it."""

    id: str
    name: str
    state: NodeState
    slots: int
    room: int
    running: int
    """Sessions it holds."""
    gateway: str
    labels: dict[str, str]
    versions: dict[str, str]
    registered: float
    deadline: float
    """When its lease ends."""
    applied: int
    """Generation of the control that it has put in place."""


class Held(msgspec.Struct, frozen=True):
    """A session that a node has, and its stage."""

    session: str
    epoch: int
    status: Status


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Give me up to `room` sessions; it also renews, so `held` names all that the node has."""

    room: int
    held: tuple[Held, ...] = ()
    applied: int = 0
    """Generation of the control that is in place; the answer comes at once if it is newer."""
    wait_s: float = LEASE_WAIT_S


class Work(msgspec.Struct, frozen=True):
    """A session to run."""

    session: Session
    task: Task


class StopWhy(StrEnum):
    """Why a node must stop a session."""

    CANCELLED = "cancelled"
    """Commit what there is, as CANCELLED."""
    STALE = "stale"
    """Its weights are too old: hand it back."""
    FENCED = "fenced"
    """It belongs to another by now: drop it."""


class Stop(msgspec.Struct, frozen=True):
    """Stop this session."""

    session: str
    epoch: int
    why: StopWhy
    by: str = ""


class LeaseResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a lease (with work) and to a renewal (without)."""

    work: tuple[Work, ...] = ()
    stop: tuple[Stop, ...] = ()
    control: Control = Control()
    draining: bool = False
    """Somebody asked this node to finish and go."""
    follow: tuple[str, ...] = ()
    """Sessions whose log somebody is reading right now."""


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """I am alive, and this is what I have."""

    held: tuple[Held, ...] = ()
    applied: int = 0


class CommitOutcome(StrEnum):
    """What became of a committed result."""

    COMMITTED = "committed"
    ALREADY = "already"
    REQUEUED = "requeued"
    """The failure is one that is tried again."""


class Commit(msgspec.Struct, frozen=True):
    """The answer to a result."""

    kept: CommitOutcome


class HandBack(msgspec.Struct, frozen=True, kw_only=True):
    """A session that its node will not finish. A node that drains costs it no attempt."""

    epoch: int
    why: str
    boundary: Boundary | None = None
    """Whose failure it was; None where nothing failed."""


# --------------------------------------------------------------------------- weights
class Version(msgspec.Struct, frozen=True):
    """New weights are in the engines."""

    version: int


class Pause(msgspec.Struct, frozen=True):
    """Hold model calls on all nodes."""

    mode: PauseMode = PauseMode.WAIT
    within_s: float = 60.0


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """Who has put the newest control in place. It holds when nobody is missing."""

    generation: int
    paused: PauseMode | None
    version: int
    applied: tuple[str, ...]
    missing: tuple[str, ...]
    """Live nodes that had not answered in time, by name."""


class Ack(msgspec.Struct, frozen=True):
    """Everything up to `cursor` is safe with the consumer."""

    cursor: int


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error body, RFC 9457."""

    type: str
    """``urn:tugline:problem:<name>``; the names stand in docs/api.md."""
    title: str
    status: int
    detail: str
    field: str = ""
    """The one that is wrong, dotted, such as ``0.limits.agent_s``."""
    known: tuple[str, ...] = ()
    """What would be right, where that is a list."""


class Dispatcher(Protocol):
    """What a node needs of a server. All raise `ServerError` when it cannot be reached in time."""

    async def register(self, hello: NodeRegistration) -> NodeRegistered:
        """Join. What a node of the same name still held is given to others."""
        ...

    async def lease(self, node: str, ask: LeaseRequest) -> LeaseResponse:
        """Wait for work, for orders or for `ask.wait_s`. Raises `FencedError` for a lost node."""
        ...

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Keep the lease. Raises `FencedError` for a lost node, which must register again."""
        ...

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Keep a result: `types.encode`, zstd-compressed. Raises `FencedError` for a lost lease."""
        ...

    async def hand_back(self, session: str, back: HandBack) -> None:
        """Give a session back to the queue. Raises `FencedError` for a lost lease."""
        ...

    async def drain(self, node: str) -> None:
        """Give this node nothing more."""
        ...

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Add to the log of a session; returns its length, from which to go on."""
        ...
