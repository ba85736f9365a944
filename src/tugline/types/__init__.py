"""The nouns of Tugline: frozen values that every other package works on.

They import nothing of ours and are what processes exchange: each is a `msgspec.Struct`, so one
definition serves memory, msgpack on disk and JSON on the wire (`encode` and `decode`).
"""

from tugline.types.call import *
from tugline.types.session import *
from tugline.types.task import *

__all__ = [
    "HANDLING", "STAGES", "TERMINAL", "Boundary", "Branch", "Call", "CallOutcome", "Callback",
    "Cause", "Distribution", "EchoChange", "Failure", "Finish", "Group", "Ids", "Image", "Ledger",
    "Limits", "LogprobMeaning", "Logprobs", "Mask", "Message", "Mode", "PluginSpec", "Policy",
    "Reason", "Reward", "Role", "Sample", "Sampling", "Session", "Span", "SpentLimit", "Stale",
    "Status", "Task", "Timings", "Tool", "ToolCall", "ToolKind", "Trace", "TraceKind", "Trajectory",
    "VersionSpan", "Workspace", "decode", "encode", "is_pass", "shared_prefix",
]  # fmt: skip
