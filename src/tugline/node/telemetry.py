"""Counters of a node's sessions, samples of its load, and tracing.

``OTEL_EXPORTER_OTLP_ENDPOINT`` enables tracing.

The exporter, `tracing`, needs an extra and is imported only if tracing is enabled.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import psutil

from tugline.errors import UsageError
from tugline.histogram import Distribution
from tugline.node.admission import EngineLoad
from tugline.node.pools import Pools
from tugline.plugins import import_extra
from tugline.protocol import EngineSample, NodeSample
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


class LoadSampler:
    """Samples the load of a node and of its engines, for the renewals of its lease."""

    every_s = 10.0
    """Minimum seconds between two samples."""

    def __init__(
        self,
        pools: Pools,
        engines: Mapping[str, EngineLoad],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` are the loads at the last poll, by URL."""
        self._pools = pools
        self._engines = engines
        self._clock = clock
        self._taken = -math.inf
        self._tokens: dict[str, tuple[float | None, float | None]] = {}
        """Prompt and sampled tokens of each engine at the last sample."""
        psutil.cpu_percent()  # measures from here on

    def take(self) -> NodeSample | None:
        """Return a sample; None if the last one was taken less than `every_s` ago."""
        now = self._clock()
        passed_s = now - self._taken
        if passed_s < self.every_s:
            return None
        self._taken = now
        engines = self._engines.items()
        return NodeSample(
            cpu=min(1.0, psutil.cpu_percent() / 100),
            memory=psutil.virtual_memory().percent / 100,
            sessions=len(self._pools.members),
            agents=self._pools.by_stage[Status.RUN].busy,
            engines=tuple(self._read(url, load, passed_s) for url, load in engines),
        )

    def _read(self, url: str, load: EngineLoad, passed_s: float) -> EngineSample:
        before = self._tokens.get(url, (None, None))
        self._tokens[url] = (load.prompt_tokens, load.sampled_tokens)
        kv = _finite(load.kv)
        return EngineSample(
            engine=url,
            running=_finite(load.running) if load.up else None,
            waiting=_finite(load.waiting),
            kv=None if kv is None else min(1.0, kv),
            prompt_tps=_rate(before[0], load.prompt_tokens, passed_s),
            sampled_tps=_rate(before[1], load.sampled_tokens, passed_s),
        )


def _finite(value: float | None) -> float | None:
    return max(0.0, value) if value is not None and math.isfinite(value) else None


def _rate(before: float | None, now: float | None, passed_s: float) -> float | None:
    """Return the growth of a counter per second; a smaller value means that it was restarted."""
    if before is None or now is None:
        return None
    return _finite((now - before if now >= before else now) / passed_s)


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
