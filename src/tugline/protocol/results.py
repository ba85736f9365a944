"""Results, and the consumers that acknowledge them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.protocol.tasks import TaskView
from tugline.types import Failure, Status


class ResultView(msgspec.Struct, frozen=True, kw_only=True):
    """A result without its tokens; those are in the `Trajectory`."""

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
    """Size of the encoded, compressed trajectory; 0 for a session that never ran."""
    seconds: dict[str, float]
    created: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of their commits, or whole groups in the order of their release."""

    items: tuple[ResultView, ...]
    groups: tuple[TaskView, ...] = ()
    """If whole groups were requested: the groups that `items` belong to."""
    cursor: int
    """Acknowledge this once the items are safe; the next request starts after it."""


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A reader of results and its acknowledged position."""

    name: str
    acked: int
    updated: float


class Ack(msgspec.Struct, frozen=True):
    """Acknowledgement of everything up to `cursor`."""

    cursor: Annotated[int, Meta(ge=0, le=2**63 - 1)]
