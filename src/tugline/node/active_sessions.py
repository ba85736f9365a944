"""A session while a node has it, and why the node gives it up before its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tugline.protocol import HeldSession, Work
from tugline.rollout.stages import StageSlots
from tugline.types import Status, Trajectory

STARTED = frozenset({Status.RUN, Status.BUILD, Status.EVAL})


class StopReason(Enum):
    """What becomes of a session whose rollout is called off."""

    DROP = "dropped"
    """It belongs to another by now."""
    STALE = "stale"
    """Its weights are too old."""
    DRAIN = "drained"
    """The node ends before the session could."""


@dataclass(slots=True, eq=False)
class ActiveSession:
    """One session that this node holds."""

    work: Work
    slots: StageSlots
    directory: Path
    status: Status = Status.INIT
    fate: StopReason | None = None
    rolling: asyncio.Task[Trajectory] | None = None
    """Until its trajectory is there."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing of it is here any more."""
    sent: int = 0
    """Bytes of its log that the server has."""
    skipped: int = 0
    """Bytes of its log that the server will not get."""
    logging: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """Of the session."""
        return self.work.session.id

    @property
    def epoch(self) -> int:
        """Of its lease."""
        return self.work.session.epoch

    @property
    def held(self) -> HeldSession:
        """As the server is told of it."""
        return HeldSession(self.id, self.epoch, self.status)

    def call_off(self, fate: StopReason) -> None:
        """End its rollout without a result; no effect on one that has its trajectory."""
        if self.rolling is None or not self.rolling.done():
            self.fate = self.fate or fate
            if self.rolling is not None:
                self.rolling.cancel()
