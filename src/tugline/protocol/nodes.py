"""Nodes, and the weights state that all of them share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.types.task import BIG

Label = dict[
    Annotated[str, Meta(min_length=1, max_length=128)], Annotated[str, Meta(max_length=1024)]
]
Labels = Annotated[Label, Meta(max_length=64)]


class PauseMode(StrEnum):
    """What happens to model calls in flight when the weights are about to change."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """State shared by all nodes; a higher generation replaces a lower one."""

    generation: int = 0
    paused: PauseMode | None = None
    version: int = 0


class NodeRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a node to join. It replaces a node of the same name."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
    slots: Annotated[int, Meta(ge=1, le=100_000)]
    """Sessions that may be in RUN at once."""
    capacity: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Sessions it can hold in all stages together."""
    gateway: Annotated[str, Meta(max_length=2048)] = ""
    """URL of its gateway as sandboxes see it."""
    labels: Labels = {}
    versions: Labels = {}
    """Of Tugline, of the engine, of its harnesses."""


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a registration."""

    node: str
    token: str
    """Opens what this node may do, and nothing else."""
    lease_s: float
    """Unless the node renews within this time, its sessions are given to other nodes."""
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
    """Sessions it holds."""
    gateway: str
    labels: dict[str, str]
    versions: dict[str, str]
    registered: float
    deadline: float
    """When its lease ends."""
    applied: int
    """Generation of the `Control` that it has applied."""


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
    """Names of live nodes that had not answered in time."""
