"""Counters of a node's sessions, and tracing, which ``OTEL_EXPORTER_OTLP_ENDPOINT`` enables.

The exporter, `tracing`, needs an extra and is imported only if tracing is enabled.
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
"""Variables with the URL of the traces endpoint, and with a base URL for ``/v1/traces``."""
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
    """Results and sessions whose lease was lost."""
    released: int = 0
    rejoined: int = 0
    """Number of times that the node lost its lease and registered again."""
    outages: int = 0
    """Number of periods in which the server could not be reached."""
    ends: Counter[Status] = field(default_factory=Counter)
    failures: Counter[Boundary] = field(default_factory=Counter)
    stage_s: dict[Status, Distribution] = field(
        default_factory=lambda: {status: Distribution() for status in STAGES}
    )
    """Seconds in each stage, without waiting for a slot."""
    trained: int = 0
    masked: Counter[Reason] = field(default_factory=Counter)
    dropped: Counter[Reason] = field(default_factory=Counter)
    untraced: int = 0
    """Sessions whose trace could not be exported."""
    disk_bytes: int = 0
    """Size of the folders of sessions and of the recordings."""
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
    """Stages in order, each with its start (Unix seconds)."""
    ended: float
    calls: Sequence[Call] = ()
    model: str = ""
    """Name of the model at the engine."""


class Tracer(Protocol):
    """Exports sessions that have ended."""

    def export(self, rollout: Rollout) -> None:
        """Queue the spans of a session. Blocks while creating them; call it in a thread."""

    def close(self) -> None:
        """Send the queued spans for a limited time."""


def open_tracer(environ: Mapping[str, str], *, node: str) -> Tracer | None:
    """Return a tracer for the node named `node`; None if not enabled. Raises `UsageError`."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    whole, base = (environ.get(name, "") for name in ENDPOINTS)
    if not whole and not base:
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _SUPPORTED)
    if protocol != _SUPPORTED:
        msg = f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, must be {_SUPPORTED}"
        raise UsageError(msg)
    what = f"tracing, enabled by {' or '.join(ENDPOINTS)},"
    tracing = import_extra("tugline.node.tracing", "otel", what)
    tracer: Tracer = tracing.Otlp(whole or f"{base.rstrip('/')}/v1/traces", node=node)
    return tracer
