"""The lease protocol between the server and its nodes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from tugline.protocol.nodes import Control, NodeRegistered, NodeRegistration
from tugline.types import Boundary, Session, Status, Task
from tugline.types.task import BIG

LEASE_WAIT_S = 30.0
"""Default time that a lease request waits for work."""
Epoch = Annotated[int, Meta(ge=0, le=2**31 - 1, description="Epoch of the lease.")]
SessionId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,160}$")]
Generation = Annotated[int, Meta(ge=0, le=BIG)]


class HeldSession(msgspec.Struct, frozen=True):
    """A session that a node holds, and its stage."""

    session: SessionId
    epoch: Epoch
    status: Status


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for up to `capacity` sessions; it also renews, so `held` lists all that are held."""

    capacity: Annotated[int, Meta(ge=0, le=1_000_000)]
    held: tuple[HeldSession, ...] = ()
    applied: Generation = 0
    """Generation of the applied `Control`; the answer comes at once if there is a newer one."""
    wait_s: Annotated[float, Meta(ge=0, le=2 * LEASE_WAIT_S)] = LEASE_WAIT_S


class Work(msgspec.Struct, frozen=True):
    """A leased session with its task."""

    session: Session
    task: Task


class StopKind(StrEnum):
    """Why a node must stop a session, and what it does with it."""

    CANCELLED = "cancelled"
    """Commit what there is, as CANCELLED."""
    STALE = "stale"
    """Its weights are too old: release it."""
    FENCED = "fenced"
    """Another node holds it now: drop it."""


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
    """The node should finish what it holds and leave."""
    follow: tuple[str, ...] = ()
    """Sessions whose log is being read."""


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a node, with everything it holds."""

    held: tuple[HeldSession, ...] = ()
    applied: Generation = 0


class CommitOutcome(StrEnum):
    """Effect of committing a result."""

    COMMITTED = "committed"
    ALREADY = "already"
    REQUEUED = "requeued"
    """The failure is retried."""


class Commit(msgspec.Struct, frozen=True):
    """Answer to a result."""

    outcome: CommitOutcome


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """Return of a session that its node will not finish. Draining costs it no attempt."""

    epoch: Epoch
    reason: Annotated[str, Meta(min_length=1, max_length=4096)]
    boundary: Boundary | None = None
    """Where it failed; None if nothing failed."""


class Dispatcher(Protocol):
    """The server as a node sees it. All raise `ServerError` if it cannot be reached in time."""

    async def register(self, registration: NodeRegistration) -> NodeRegistered:
        """Join. Sessions held by a node of the same name are given to others."""
        ...

    async def lease(self, node: str, request: LeaseRequest) -> LeaseResponse:
        """Wait up to `request.wait_s` for work or orders. Raises `FencedError` for a lost node."""
        ...

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Keep the lease. Raises `FencedError` for a lost node, which must register again."""
        ...

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Store a result (`types.encode`, zstd). Raises `FencedError` for a lost lease."""
        ...

    async def release(self, session: str, release: Release) -> None:
        """Return a session to the queue. Raises `FencedError` for a lost lease."""
        ...

    async def drain(self, node: str) -> None:
        """Give this node no more work."""
        ...

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append to the log of a session; returns its length, where the next chunk starts."""
        ...
