"""The nouns of Tugline: frozen values that every other package works on.

They import nothing of ours and are what processes exchange: each is a `msgspec.Struct`, so one
definition serves memory, msgpack on disk and JSON on the wire (`encode` and `decode`).
"""

from tugline.types.arrays import Ids, Logprobs, Mask, decode, encode, shared_prefix
from tugline.types.call import (
    Branch,
    Call,
    CallOutcome,
    EchoChange,
    Finish,
    Image,
    LogprobMeaning,
    Message,
    Mode,
    Role,
    Timings,
    Tool,
    ToolCall,
    ToolKind,
    TraceKind,
    VersionSpan,
)
from tugline.types.session import (
    HANDLING,
    TERMINAL,
    TRANSITIONS,
    Boundary,
    Cause,
    Failure,
    Reward,
    Session,
    SpentLimit,
    Status,
    Trajectory,
)
from tugline.types.task import (
    Callback,
    Group,
    Limits,
    PluginSpec,
    Policy,
    Sampling,
    Stale,
    Task,
    Workspace,
)
from tugline.types.trace import Distribution, Ledger, Reason, Sample, Span, Trace

__all__ = [
    "HANDLING", "TERMINAL", "TRANSITIONS", "Boundary", "Branch", "Call", "CallOutcome", "Callback",
    "Cause", "Distribution", "EchoChange", "Failure", "Finish", "Group", "Ids", "Image", "Ledger",
    "Limits", "LogprobMeaning", "Logprobs", "Mask", "Message", "Mode", "PluginSpec", "Policy",
    "Reason", "Reward", "Role", "Sample", "Sampling", "Session", "Span", "SpentLimit", "Stale",
    "Status", "Task", "Timings", "Tool", "ToolCall", "ToolKind", "Trace", "TraceKind", "Trajectory",
    "VersionSpan", "Workspace", "decode", "encode", "shared_prefix",
]  # fmt: skip
