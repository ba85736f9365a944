"""Data types of Tugline: frozen structs that all other packages use.

They import nothing else of Tugline. Each is a `msgspec.Struct`, so one definition serves memory,
msgpack on disk (`encode` and `decode`) and JSON between processes.
"""

from tugline.types.arrays import *
from tugline.types.call import *
from tugline.types.session import *
from tugline.types.task import *

__all__ = [
    "HANDLING", "HELD_OUT", "INSTANCE", "PASS", "STAGES", "TERMINAL", "Boundary", "Branch", "Call",
    "CallOutcome", "Callback", "Cause", "Distribution", "EchoChange", "Experts", "Failure",
    "Finish", "Group", "Ids", "Image", "Kept", "Ledger", "Limits", "LogprobMeaning", "Logprobs",
    "MalformedCalls", "Mask", "MaskedSpan", "Message", "Mode", "PluginSpec", "Policy", "Reason",
    "RecordingRef", "Reward", "Role", "Sample", "Sampling", "Session", "Span", "SpentLimit",
    "Stale", "Status", "Task", "Timings", "Tool", "ToolCall", "ToolKind", "Trace", "TraceKind",
    "Trajectory", "VersionSpan", "Workspace", "count_prompt_tokens", "decode", "encode",
    "is_by_agent", "is_held_out", "is_pass", "make_decoder", "measure_engine", "name_problem",
    "plain_text", "shared_prefix", "union_seconds",
]  # fmt: skip
