"""Counters, stage times and traces of a node's sessions.

Recording returns at once. A trace is made and sent in a thread after its session has ended, so no
session waits for it or fails because of it. ``OTEL_EXPORTER_OTLP_ENDPOINT`` switches tracing on;
the exporter is an extra, imported only then.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec.structs import replace

from tugline import log
from tugline.errors import TuglineError, UsageError
from tugline.histogram import Distribution
from tugline.protocol import Work
from tugline.types import Boundary, Call, Reason, Session, Status, Task, Trajectory

_MAX_SESSIONS = 4096
"""Sessions whose stages are remembered; some never end here, because they moved to other nodes."""
_MAX_QUEUED = 256
"""Sessions whose trace waits to be made; further ones are not traced."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The URL itself, and one that the path of traces is appended to."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED = "http/protobuf"
_log = log.get("node.telemetry")

Calls = Callable[[str], Sequence[Call]]
"""Returns the recorded calls of a session."""


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
    sampled: int = 0
    trained: int = 0
    masked: Counter[Reason] = field(default_factory=Counter)
    dropped: Counter[Reason] = field(default_factory=Counter)
    disk_bytes: int = 0
    """Size of sessions and recordings."""
    disk_low: bool = False

    def count_result(self, trajectory: Trajectory) -> None:
        """Add a result to the totals."""
        self.ends[trajectory.status] += 1
        if trajectory.failure is not None:
            self.failures[trajectory.failure.boundary] += 1
        ledger = trajectory.ledger
        self.sampled += ledger.sampled
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
    node: str = ""
    model: str = ""
    """Its name at the engine."""


class Tracer(Protocol):
    """Exports sessions that have ended, without delaying or failing any."""

    def export(self, rollout: Rollout) -> None:
        """Queue the spans of a session. Blocks while they are made; call it in a thread."""

    def close(self) -> None:
        """Send what is queued, for a bounded time."""


class Telemetry:
    """Stage times, and a trace of each session if there is a tracer."""

    def __init__(
        self, *, node: str, model: str, calls: Calls, tracer: Tracer | None = None
    ) -> None:
        """`node` and `model` are their names in traces; `calls` is called in a thread."""
        self.stage_s = {
            status: Distribution()
            for status in (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
        }
        """Seconds in each stage, without the wait for a slot."""
        self.untraced = 0
        """Sessions without a trace, because it could not be made or the queue was full."""
        self._node, self._model, self._calls, self._tracer = node, model, calls, tracer
        self._stages: dict[tuple[str, int], list[tuple[Status, float]]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tugline-traces")
        self._queue_slots = threading.BoundedSemaphore(_MAX_QUEUED)

    def record_stage(self, work: Work, status: Status) -> None:
        """A stage begins."""
        key = (work.session.id, work.session.epoch)
        self._stages.setdefault(key, []).append((status, time.time()))
        if len(self._stages) > _MAX_SESSIONS:
            del self._stages[next(iter(self._stages))]

    def record_result(self, work: Work, trajectory: Trajectory) -> None:
        """A rollout has its trajectory, which is not committed yet."""
        for status, distribution in self.stage_s.items():
            if status.value in trajectory.seconds:
                distribution.add(trajectory.seconds[status.value])
        stages = self._stages.pop((work.session.id, work.session.epoch), [])
        if self._tracer is None or not stages:
            return
        if not self._queue_slots.acquire(blocking=False):
            self.untraced += 1
            return
        rollout = Rollout(
            task=work.task,
            session=work.session,
            trajectory=trajectory,
            stages=stages,
            ended=time.time(),
            node=self._node,
            model=self._model,
        )
        job = self._executor.submit(self._trace, self._tracer, rollout)
        job.add_done_callback(self._on_traced)

    async def close(self) -> None:
        """Send what is queued, for a bounded time."""
        await asyncio.to_thread(self._executor.shutdown)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _trace(self, tracer: Tracer, rollout: Rollout) -> None:
        with contextlib.suppress(KeyError):  # the gateway never opened it
            rollout = replace(rollout, calls=self._calls(rollout.session.id))
        tracer.export(rollout)

    def _on_traced(self, job: Future[None]) -> None:
        self._queue_slots.release()
        error = job.exception()
        if error is not None:
            self.untraced += 1
            message = str(error) if isinstance(error, TuglineError) else repr(error)
            _log.warning("no trace", error=message)


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
    try:
        from tugline.node.tracing import Otlp  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise UsageError(
            f"{' or '.join(ENDPOINTS)} asks for traces, which need the extra 'otel' "
            f"({error.name} is not there): pip install 'tugline[otel]'"
        ) from error
    return Otlp(whole or f"{base.rstrip('/')}/v1/traces", node=node)
