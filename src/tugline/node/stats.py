"""What a node counts about itself, as plain numbers; `metrics.py` gives them to Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from tugline.protocol import Work
from tugline.types import Boundary, Reason, Status, Trajectory


@dataclass(slots=True)
class Stats:
    """Totals since the node started."""

    leased: int = 0
    committed: int = 0
    requeued: int = 0
    """Results of which the server said that the session is tried again."""
    fenced: int = 0
    """Results and sessions that belonged to another by then."""
    handed_back: int = 0
    rejoined: int = 0
    """Times that the node had lost its lease and registered again."""
    outages: int = 0
    """Times that the server could not be reached."""
    ends: Counter[Status] = field(default_factory=Counter)
    failures: Counter[Boundary] = field(default_factory=Counter)
    sampled: int = 0
    trained: int = 0
    masked: Counter[Reason] = field(default_factory=Counter)
    dropped: Counter[Reason] = field(default_factory=Counter)
    disk_bytes: int = 0
    """That sessions and recordings take up."""
    disk_low: bool = False

    def ended(self, trajectory: Trajectory) -> None:
        """Count one more result."""
        self.ends[trajectory.status] += 1
        if trajectory.failure is not None:
            self.failures[trajectory.failure.boundary] += 1
        ledger = trajectory.ledger
        self.sampled += ledger.sampled
        self.trained += ledger.trained
        self.masked.update(ledger.masked)
        self.dropped.update(ledger.dropped)


class Observer(Protocol):
    """Told of what happens to sessions. It must return at once and raise nothing."""

    def stage(self, work: Work, status: Status) -> None:
        """A stage begins."""
        ...

    def ended(self, work: Work, trajectory: Trajectory) -> None:
        """A rollout has its trajectory, which is not committed yet."""
        ...
