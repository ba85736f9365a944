"""Counters of a node's sessions, and the tracing that ``OTEL_EXPORTER_OTLP_ENDPOINT`` switches on.

The exporter, `tracing`, is an extra that is imported only then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tugline.errors import UsageError
from tugline.histogram import Distribution
from tugline.plugins import import_extra
from tugline.types import STAGES, Boundary, Call, Reason, Session, Status, Task, Trajectory

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The URL itself, and one that the path of traces is appended to."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED = "http/protobuf"


@dataclass(slots=True)
class Stats:
    """Totals since the node started."""

    leased: int = 0
    committed: int = 0
    requeued: int = 0
    """Results after which the server retries the session."""
    fenced: int = 0
    """Results and sessions whose lease had been lost."""
    released: int = 0
    rejoined: int = 0
    """Times that the node had lost its lease and registered again."""
    outages: int = 0
    """Times that the server could not be reached."""
    ends: Counter[Status] = field(default_factory=Counter)
    failures: Counter[Boundary] = field(default_factory=Counter)
    stage_s: dict[Status, Distribution] = field(
        default_factory=lambda: {status: Distribution() for status in STAGES}
    )
    """Seconds in each stage, without the wait for a slot."""
    trained: int = 0
    masked: Counter[Reason] = field(default_factory=Counter)
    dropped: Counter[Reason] = field(default_factory=Counter)
    untraced: int = 0
    """Sessions without a trace, because it could not be made."""
    disk_bytes: int = 0
    """Size of sessions and recordings."""
    disk_low: bool = False

    def count_result(self, trajectory: Trajectory) -> None:
        """Add a result to the totals."""
        self.ends[trajectory.status] += 1
        if trajectory.failure is not None:
            self.failures[trajectory.failure.boundary] += 1
        for status, distribution in self.stage_s.items():
            if status.value in trajectory.seconds:
                distribution.add(trajectory.seconds[status.value])
        ledger = trajectory.ledger
        self.trained += ledger.trained
        self.masked.update(ledger.masked)
        self.dropped.update(ledger.dropped)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended."""

    task: Task
    session: Session
    trajectory: Trajectory
    stages: Sequence[tuple[Status, float]]
    """Stages in their order with their start (Unix seconds)."""
    ended: float
    calls: Sequence[Call] = ()
    model: str = ""
    """Its name at the engine."""


class Tracer(Protocol):
    """Exports sessions that have ended."""

    def export(self, rollout: Rollout) -> None:
        """Queue the spans of a session. Blocks while they are made; call it in a thread."""

    def close(self) -> None:
        """Send what is queued, for a bounded time."""


def open_tracer(environ: Mapping[str, str], *, node: str) -> Tracer | None:
    """The tracer of the node called `node`; None unless asked for. Raises `UsageError`."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    whole, base = (environ.get(name, "") for name in ENDPOINTS)
    if not whole and not base:
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _SUPPORTED)
    if protocol != _SUPPORTED:
        msg = f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; traces are sent by {_SUPPORTED} alone"
        raise UsageError(msg)
    what = f"sending traces, for which {' or '.join(ENDPOINTS)} asks,"
    tracing = import_extra("tugline.node.tracing", "otel", what)
    tracer: Tracer = tracing.Otlp(whole or f"{base.rstrip('/')}/v1/traces", node=node)
    return tracer
