"""Messages about where the time of sessions goes, and about the load of nodes and engines."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.protocol.clients import Name

Amount = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[int, Meta(ge=0, le=2**53, description="Unix seconds.")]
VersionNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


# --------------------------------------------------------------------------- time of sessions
class TimeParts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over sessions with a result of a node, in seconds from submission to result.

    The times in stages are those of the last attempt. Time without a server is in no sum; a session
    that runs again starts at 0.
    """

    sessions: int = 0
    waiting_s: float = 0.0
    """Waiting in the queue, before all attempts, and for a slot of the agent's stage."""
    sandbox_s: float = 0.0
    """Stage INIT: installing the harness, opening the sandbox."""
    engine_s: float = 0.0
    """At least one model call was at the engine."""
    agent_s: float = 0.0
    """Rest of the agent's stage: the agent and its tools."""
    unsplit_s: float = 0.0
    """Agent's stage of sessions whose nodes do not report the time at the engine."""
    evaluation_s: float = 0.0
    other_s: float = 0.0
    """Building traces, earlier attempts, other waits, and handing over the result."""


class TimePoint(TimeParts, frozen=True, kw_only=True):
    """Sums over the sessions of some versions, or of a time."""

    at: float
    """First version, or start of the time in Unix seconds."""


class TimeSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of sessions went."""

    total: TimeParts
    points: tuple[TimePoint, ...]
    """In ascending order; those without sessions are left out."""
    width: int
    """Versions or seconds of each point."""
    unmeasured: int
    """Results of older releases, which are in no sum."""
    since: float | None = None
    """Minute of the first of the results; None without any."""
    until: float | None = None
    """End of the minute of the last of the results."""


class TimeAxis(StrEnum):
    """What the points of `TimeSpent` are by."""

    VERSION = "version"
    TIME = "time"


class TimeQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions whose time is summed."""

    run: Name | None = None
    """Only sessions of this run."""
    by: TimeAxis = TimeAxis.VERSION
    """Version of the weights when a session was leased, or time of its result."""
    first: VersionNumber | None = None
    """Only versions from this one on."""
    last: VersionNumber | None = None
    """Only versions up to this one."""
    since: Seconds | None = None
    """Only results from this time on, to the minute."""
    until: Seconds | None = None
    """Only results before this time, to the minute."""
    points: Annotated[int, Meta(ge=1, le=1000)] = 200
    """Maximum number of points."""


# --------------------------------------------------------------------------- load over time
class EngineSample(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine as its metrics report it; None where they do not."""

    engine: Annotated[str, Meta(min_length=1, max_length=2048)]
    """URL of the replica."""
    running: Amount | None = None
    """Requests that are computed."""
    waiting: Amount | None = None
    """Requests in the engine's queue."""
    kv: Share | None = None
    """Share of the KV cache in use."""
    prompt_tps: Amount | None = None
    """Prompt tokens per second since the last sample."""
    sampled_tps: Amount | None = None
    """Sampled tokens per second since the last sample."""


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a node's machine and of its engines."""

    cpu: Share
    """Share of the machine's processors in use since the last sample."""
    memory: Share
    """Share of the machine's memory in use."""
    sessions: Amount
    """Sessions on the node."""
    agents: Amount
    """Sessions in the agent's stage."""
    engines: Annotated[tuple[EngineSample, ...], Meta(max_length=256)] = ()


class TelemetryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Range of the stored load."""

    since: Seconds | None = None
    """Start (default: an hour before the end)."""
    until: Seconds | None = None
    """End (default: now)."""
    node: Annotated[str, Meta(max_length=160)] | None = None
    """Only the node of this name, and its engines."""
    points: Annotated[int, Meta(ge=1, le=1000)] = 240
    """Maximum number of points of a series."""


class TelemetrySeries(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a node, or of an engine as its nodes report it, over time."""

    node: str
    """Name of the node; empty for an engine, unless one node was asked for."""
    engine: str
    """URL of the engine; empty for a node."""
    at: tuple[float, ...]
    """Start of each interval in Unix seconds; intervals without a sample are left out."""
    values: dict[str, tuple[float | None, ...]]
    """Means by the name of a field of `NodeSample` or `EngineSample`; None where unknown."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Load of nodes and engines over time."""

    width_s: int
    """Length of the intervals in seconds; older samples are kept with a length of 60 or 600."""
    series: tuple[TelemetrySeries, ...]
