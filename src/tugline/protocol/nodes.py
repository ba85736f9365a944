"""Messages of nodes: registration, leases, results, and the shared state of the weights."""

from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from tugline.protocol.telemetry import NodeSample
from tugline.types import Boundary, Session, Status, Task
from tugline.types.task import BIG, Labels


class PauseMode(StrEnum):
    """Treatment of model calls in flight when the weights are about to change."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """State shared by all nodes; a higher generation replaces a lower one."""

    generation: int = 0
    paused: PauseMode | None = None
    version: int = 0


class NodeRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a node to join; the node replaces an earlier process of the same node."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
    slots: Annotated[int, Meta(ge=1, le=100_000)]
    """Maximum number of sessions in stage RUN."""
    capacity: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Maximum number of sessions in all stages together."""
    gateway: Annotated[str, Meta(max_length=2048)] = ""
    """URL of the node's gateway for programs in sandboxes."""
    labels: Labels = {}
    versions: Labels = {}
    """Versions of Tugline, the engine and the harnesses."""
    instance: Annotated[str, Meta(max_length=64)] = ""
    """Id of the node's folder; a live node of the same name in another folder is not replaced."""
    problem: Annotated[str, Meta(max_length=2000)] = ""
    """Reason why sandboxes cannot start; the node then starts in quarantine."""


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a registration."""

    node: str
    token: str
    """Token that permits only the requests of this node."""
    lease_s: float
    """Seconds within which the node must renew, or its sessions are given to other nodes."""
    control: Control


class NodeState(StrEnum):
    """Whether a node gets work."""

    LIVE = "live"
    DRAINING = "draining"
    GONE = "gone"


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a node."""

    id: str
    name: str
    state: NodeState
    slots: int
    capacity: int
    running: int
    """Sessions that are leased to the node."""
    gateway: str
    labels: dict[str, str]
    versions: dict[str, str]
    registered: float
    deadline: float
    """End of the node's lease."""
    applied: int
    """Generation of the applied `Control`."""
    fault: str = ""
    """Reason for the quarantine; empty without quarantine."""


class Version(msgspec.Struct, frozen=True):
    """Announcement that the engines serve new weights."""

    version: Annotated[int, Meta(ge=0, le=BIG)]


class Pause(msgspec.Struct, frozen=True):
    """Request to hold model calls on all nodes."""

    mode: PauseMode = PauseMode.WAIT
    within_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class Barrier(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that have applied the newest `Control`; complete when none is missing."""

    generation: int
    paused: PauseMode | None
    version: int
    applied: tuple[str, ...]
    missing: tuple[str, ...]
    """Names of live nodes that did not confirm in time."""


LEASE_WAIT_S = 30.0
"""Default time that a lease request waits for work."""
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1, description="Epoch of the lease.")]
SessionId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]


class HeldSession(msgspec.Struct, frozen=True):
    """A session that a node holds, and its stage."""

    session: SessionId
    epoch: Epoch
    status: Status


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a node, with all sessions that it holds."""

    held: tuple[HeldSession, ...] = ()
    applied: Annotated[int, Meta(ge=0, le=BIG)] = 0
    """Generation of the applied `Control`; if there is a newer one, the answer comes at once."""
    problem: Annotated[str, Meta(max_length=2000)] | None = None
    """Reason why the node's own test failed, which puts it in quarantine; empty ends it. None
    leaves it as it is."""
    sample: NodeSample | None = None
    """Load of the node and its engines; None between two samples."""


class LeaseRequest(Renewal, frozen=True, kw_only=True):
    """Request for up to `capacity` sessions; also renews the leases of all sessions in `held`."""

    capacity: Annotated[int, Meta(ge=0, le=1_000_000)]
    wait_s: Annotated[float, Meta(ge=0, le=2 * LEASE_WAIT_S)] = LEASE_WAIT_S


class Work(msgspec.Struct, frozen=True):
    """A leased session with its task."""

    session: Session
    task: Task


class StopKind(StrEnum):
    """Reason to stop a session, which decides the node's next step."""

    CANCELLED = "cancelled"
    """Commit the partial result as CANCELLED."""
    STALE = "stale"
    """The weights are too old: release the session."""
    FENCED = "fenced"
    """Another node holds the session: discard it."""


class Stop(msgspec.Struct, frozen=True):
    """Order to stop a session."""

    session: str
    epoch: int
    reason: StopKind
    by: str = ""


class LeaseResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a lease request (with work) or a renewal (without)."""

    work: tuple[Work, ...] = ()
    stop: tuple[Stop, ...] = ()
    control: Control = Control()
    draining: bool = False
    """True if the node is to finish its sessions and exit."""
    follow: tuple[str, ...] = ()
    """Sessions whose log has readers."""


class CommitOutcome(StrEnum):
    """Effect of committing a result."""

    COMMITTED = "committed"
    ALREADY = "already"
    REQUEUED = "requeued"
    """The session failed and is queued for another attempt."""


class Commit(msgspec.Struct, frozen=True):
    """Response to a committed result."""

    outcome: CommitOutcome


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Return of an unfinished session. A release due to draining does not count as an attempt."""

    epoch: Epoch
    reason: Annotated[str, Meta(min_length=1, max_length=4096)]
    boundary: Boundary | None = None
    """Boundary of the failure; None if nothing failed."""


class LogLength(msgspec.Struct, frozen=True):
    """Length of a log in bytes, which is the offset of the next chunk."""

    length: int


class Dispatcher(Protocol):
    """Interface of the server to nodes. All methods raise `ServerError` if it is unreachable."""

    async def register(self, registration: NodeRegistration) -> NodeRegistered:
        """Join. Sessions of an earlier process of the node are given to other nodes."""

    async def lease(self, node: str, request: LeaseRequest) -> LeaseResponse:
        """Wait up to `request.wait_s` for work or orders. Raises `FencedError` for a lost node."""

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Renew the lease. Raises `FencedError` for a lost node, which must register again."""

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Store a result (`types.encode`, zstd). Raises `FencedError` for a lost lease."""

    async def release(self, session: str, release: Release) -> None:
        """Return a session to the queue. Raises `FencedError` for a lost lease."""

    async def drain(self, node: str) -> None:
        """Lease no more sessions to this node."""

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append to the log of a session; returns its length, where the next chunk starts."""
