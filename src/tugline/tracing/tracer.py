"""Open the tracer that the environment asks for.

``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on. The exporter is an extra, imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from tugline.errors import UsageError
from tugline.types import Call, Session, Status, Task, Trajectory

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The URL itself, and one that the path of traces is appended to."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED = "http/protobuf"


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
        ...

    def close(self) -> None:
        """Send what is queued, for a bounded time."""
        ...


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
        from tugline.tracing.otlp import Otlp  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        msg = (
            f"{' or '.join(ENDPOINTS)} asks for traces, which need the extra 'otel' "
            f"({error.name} is not there): pip install 'tugline[otel]'"
        )
        raise UsageError(msg) from error
    return Otlp(whole or f"{base.rstrip('/')}/v1/traces", node=node)
