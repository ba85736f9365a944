"""Whether traces are sent, and to whom; asked for by the environment, as everywhere else.

``OTEL_EXPORTER_OTLP_ENDPOINT`` switches it on. The library that sends is an extra, and imported
only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tugline.errors import UsageError
from tugline.tracing.spans import Rollout

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The address itself, and one that the path of traces is added to."""
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"


class Tracer(Protocol):
    """Takes sessions that are over. It blocks no session, fails none, and forgets what is late."""

    def tell(self, rollout: Rollout) -> None:
        """Queue the spans of a session; call it in a thread, for many calls are many spans."""
        ...

    def close(self) -> None:
        """Send what is queued, for a bounded time."""
        ...


def open_tracer(environ: Mapping[str, str], *, node: str) -> Tracer | None:
    """What the environment asks for; None if that is nothing. Raises `UsageError`.

    `node` is the name of the node whose sessions are told.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    whole, base = (environ.get(name, "") for name in ENDPOINTS)
    if not whole and not base:
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _SPOKEN)
    if protocol != _SPOKEN:
        msg = f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; traces are sent by {_SPOKEN} alone"
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
