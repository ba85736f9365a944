"""Tasks and their sessions, as the API shows them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tugline.types import Status


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is stored durably."""

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
    """Why it was closed early: ``min_usable``, ``deadline`` or ``cancelled by ...``."""
    released: int | None = None
    """Position of its release."""
    tags: dict[str, str] = {}


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
    """Who asked it to stop, until it has."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a list; `next` is the cursor of the next page, None on the last one."""

    tasks: tuple[TaskView, ...] = ()
    sessions: tuple[SessionView, ...] = ()
    next: str | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the server's state."""

    sessions: dict[str, int]
    """By status."""
    tasks_open: int
    nodes: int
    """Live nodes."""
    slots: int
    """Sessions that the live nodes may run at once."""
    position: int
    """Position of the latest event."""
    version: int
    """Of the weights."""
    paused: bool
    dead_deliveries: int


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a cancellation."""

    ended: tuple[str, ...]
    """Sessions that had not started and are CANCELLED now."""
    stopping: tuple[str, ...]
    """Running sessions; their nodes are asked to stop them."""
    final: int
    """Sessions that were final before."""
