"""Timeouts and bounds of the gateway in one object, so that tests can shorten them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Durations in seconds, sizes in bytes; the defaults suit production."""

    # Requests of clients
    max_body: int = 64 << 20
    """Largest request body, also after decompression."""
    body_timeout_s: float = 60.0
    headers_within_s: float = 2.0
    """How long a stream's headers wait for the first token, so that early faults get a status."""
    keep_alive_s: float = 15.0
    """Silence in a stream after which a keep-alive is sent."""
    recent_calls: int = 8
    """Calls of a session that a repeated request is compared with."""
    closed_sessions: int = 4096
    """Closed sessions whose calls can still be read."""

    # One completion
    grace_s: float = 0.6
    """How long an answer goes on without a client, since a retry may be on its way."""
    partial_answer_s: float = 0.8
    """How long an engine may take to hand over its part of an aborted answer."""
    cancel_timeout_s: float = 10.0
    """How long a cancelled call may take to be recorded."""
    pause_timeout_s: float = 900.0
    """Longest wait for weights to be swapped."""
    failovers: int = 4
    """How often one answer moves to another replica after its first token."""

    # Replicas
    tries: int = 4
    """Attempts to get a first token."""
    backoff_s: float = 0.25
    """First delay between attempts; it doubles."""
    longest_retry_after_s: float = 20.0
    """A ``Retry-After`` beyond this is passed on to the client."""
    eject_after: int = 2
    """Consecutive faults after which a replica is left out."""
    probe_every_s: float = 1.0
    """Pause between probes of ejected replicas."""
    probe_timeout_s: float = 5.0


DEFAULTS = CallSettings()
