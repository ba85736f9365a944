"""Messages between server, nodes and clients: the bodies of the API under ``/v1``.

Every message is a frozen struct, so one definition serves the HTTP bodies, their OpenAPI schema
and calls inside one process. Times are Unix seconds, durations seconds. A `position` numbers
events in commit order; it never repeats or goes back, so "after position N" is a cursor that
survives every restart (I3).

`Dispatcher` is the interface of a server to its nodes, over HTTP or in the same process.
"""

from tugline.protocol.changes import *
from tugline.protocol.clients import *
from tugline.protocol.nodes import *
from tugline.protocol.queries import *
from tugline.protocol.runs import *
from tugline.protocol.telemetry import *

__all__ = [
    "LEASE_WAIT_S", "PROBLEM", "Accepted", "Ack", "Barrier", "Cancelled", "Change", "ChangeQuery",
    "Changes", "Commit", "CommitOutcome", "Consumer", "Control", "Counts", "Delivery",
    "DeliveryQuery", "DeliveryState", "Dispatcher", "EngineSample", "Estimate", "Event",
    "EventKind", "EventQuery", "FieldError", "HeldSession", "LeaseRequest", "LeaseResponse",
    "LogLength", "LogQuery", "Measure", "Name", "NodeRegistered", "NodeRegistration", "NodeSample",
    "NodeState", "NodeView", "Page", "PageQuery", "Pause", "PauseMode", "Position", "Problem",
    "ProblemQuery", "ProblemScore", "RejudgeRequest", "Rejudging", "Release", "Renewal",
    "ResultQuery", "ResultView", "Results", "RunKind", "RunPart", "RunStart", "RunStep", "RunView",
    "SessionNote", "SessionOrder", "SessionQuery", "SessionView", "StatusQuery", "StepQuery",
    "Stop", "StopKind", "TaskQuery", "TaskState", "TaskView", "Telemetry", "TelemetryQuery",
    "TelemetrySeries", "TimeAxis", "TimeParts", "TimePoint", "TimeQuery", "TimeSpent",
    "VerdictChoice", "VerdictView", "Version", "WebhookBody", "Work",
]  # fmt: skip
