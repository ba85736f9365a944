"""Traces and ledgers of their tokens (I1, I2); sessions, failures and results (I5)."""

from enum import StrEnum
from typing import Any

import msgspec

from tugline.types.arrays import Experts, Ids, Kept, Logprobs, Mask
from tugline.types.call import LogprobMeaning, Reason, TraceKind


class Ledger(msgspec.Struct, frozen=True):
    """Conservation of tokens (I2): ``sampled == trained + masked + dropped``."""

    sampled: int = 0
    trained: int = 0
    masked: dict[Reason, int] = {}
    """Tokens in traces as context, without loss."""
    dropped: dict[Reason, int] = {}
    """Tokens in no trace."""

    @property
    def balanced(self) -> bool:
        """Whether every sampled token is accounted for exactly once."""
        return self.sampled == (
            self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        )


class Distribution(msgspec.Struct, frozen=True):
    """Distribution that tokens were sampled from, and that of their logprobs."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 disables it."""
    top_k: int = 0
    """0 disables it."""
    logprobs: LogprobMeaning = LogprobMeaning.PROCESSED
    min_p: float = 0.0
    """0 disables it."""

    @property
    def forward_temperature(self) -> float | None:
        """Temperature at which a forward pass gives the captured logprobs; None for a greedy one.

        Raw logprobs are those at 1.
        """
        if self.logprobs is LogprobMeaning.RAW:
            return 1.0
        return self.temperature or None

    @property
    def needs_kept(self) -> bool:
        """Whether the captured logprobs depend on the tokens that were left to choose from."""
        truncated = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return truncated and self.logprobs is LogprobMeaning.PROCESSED


class Span(msgspec.Struct, frozen=True):
    """Trace tokens ``[start, end)`` were sampled by `call` under policy `version`."""

    call: int
    start: int
    end: int
    version: int
    masked: Reason | None = None
    distribution: Distribution = Distribution()
    engine: str = ""
    """Kind of engine that sampled the tokens; empty if unknown."""
    malformed: bool = False
    """Whether the answer has a malformed tool call. False in results of older versions, as is
    `truncated`."""
    truncated: bool = False
    """Whether the answer ended at its token limit."""
    repeats: int = 0
    """Number of answers directly before this one, in its conversation, with the same tool calls."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A token sequence to train on; arrays all have shape ``(n,)``.

    ``logprobs[i]`` is the captured log probability of ``ids[i]`` given ``ids[:i]`` where a span
    covers ``i``, and 0 elsewhere. ``mask[i]`` is True where ``ids[i]`` is trained on.
    """

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    spans: tuple[Span, ...]
    kind: TraceKind = TraceKind.MAIN
    parent: int | None = None
    """Index in the trajectory of the trace that this trace forked from or was started by."""
    shared: int = 0
    """Number of leading ids shared with the parent, whose computation can be reused."""
    thread: str | None = None
    """The harness's own conversation id, if it sends one."""
    thinking_retention: str = ""
    """Turns whose reasoning stayed in the context; empty if the engine decided."""
    exact: bool = True
    """Whether the context has exactly the ids that the engine was given when it sampled (I1)."""
    images: tuple[str, ...] = ()
    """SHA-256 in hex of the images in the context, in order; the recording has their data."""
    experts: Experts | None = None
    """Experts of the leading ids, shape ``(m, layers, top_k)`` with ``m <= n``; None if no engine
    reported any. If `mask` is True at ``i``, they are those with which the context of ``ids[i]``
    was computed when it was sampled, and ``i <= m``."""
    kept: Kept | None = None
    """Sets of ids that the sampled ones were chosen from, one for each id; None if there are none.
    """

    @property
    def trained(self) -> int:
        """Number of tokens to train on."""
        return int(self.mask.sum())


# --------------------------------------------------------------------------- for trainers
class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Flat arrays for a trainer, one per trace; shapes ``(n,)``.

    `advantages` is 0 where nothing is trained, `versions` -1 where nothing was sampled.
    `logprobs` are those of a forward pass whose logits are divided by `temperatures`.
    """

    input_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    versions: Ids
    advantages: Logprobs
    temperatures: Logprobs
    group: str
    session: str
    engine: str = ""
    """Kind of engine that sampled the tokens; empty if unknown."""
    harness: str = ""
    """Name of the session's harness; empty if unknown."""
    reward: float | None = None
    """Reward of the session; None for text that no policy sampled."""
    reward_parts: dict[str, float] = {}
    experts: Experts | None = None
    """Experts of the leading ids; see `Trace`."""
    kept: Kept | None = None
    """Sets that the ids were chosen from; `logprobs` are renormalised over a set that is not empty.
    """
    masked: dict[Reason, int] = {}
    """Number of the trace's sampled tokens that are not trained, by reason."""

    @property
    def trained(self) -> int:
        """Number of tokens to train on."""
        return int(self.loss_mask.sum())


# --------------------------------------------------------------------------- sessions
class Status(StrEnum):
    """State of a session; `TERMINAL` has the final ones. A lost lease leads back to QUEUED."""

    QUEUED = "queued"
    INIT = "init"
    READY = "ready"
    RUN = "run"
    BUILD = "build"
    EVAL = "eval"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})
STAGES = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
"""States of a session that a node runs, in order."""
PASS = 1.0 - 1e-6
"""Least reward of a solved task: 1, within rounding."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a sample of a task. `epoch` fences results of lost leases."""

    id: str
    task: str
    sample: int
    attempt: int = 0
    epoch: int = 0
    status: Status = Status.QUEUED


# --------------------------------------------------------------------------- failure
class Boundary(StrEnum):
    """Component that failed; determines retries and whether the failure counts for the policy."""

    ENGINE = "engine"
    HARNESS = "harness"
    AGENT = "agent"
    RUNTIME = "runtime"
    EVALUATOR = "evaluator"
    INFRASTRUCTURE = "infrastructure"


class Cause(StrEnum):
    """Specific cause of a failure; `HANDLING` defines its consequences."""

    SANDBOX = "sandbox"
    """The sandbox of the agent or the evaluator could not be created, or was lost."""
    NETWORK = "network"
    """The sandbox could not be connected to the gateway or to an allowed host."""
    IMAGE = "image"
    """A container image is missing, cannot be pulled, or its Dockerfile is broken."""
    WORKSPACE = "workspace"
    """A repository, commit or folder that the task starts from is not available."""
    DISK = "disk"
    """The node's disk is full."""
    NODE = "node"
    """The node was lost, or failed unexpectedly."""
    RECORDING = "recording"
    """The session's calls could not be recorded, read back, or built into traces."""
    RESULT = "result"
    """The server refused the result, for example because it is too large."""
    INIT_TIMEOUT = "init_timeout"
    """`Limits.init_s` expired before the agent could start."""
    WAIT_TIMEOUT = "wait_timeout"
    """`Limits.total_s` expired while the session waited, or while its traces were built."""
    ENGINE = "engine"
    """The model server refused the harness's request, or reported no usable tokens."""
    ENGINE_LOST = "engine_lost"
    """The model server failed, hung or could not be reached."""
    INSTALL = "install"
    """The agent program cannot be installed or configured."""
    CRASH = "crash"
    """The agent program crashed, according to its output."""
    NO_MODEL_CALL = "no_model_call"
    """The agent program ended without a model call."""
    AGENT_TIMEOUT = "agent_timeout"
    """`Limits.agent_s` expired; recorded calls are built into traces and the work is evaluated."""
    TOTAL_TIMEOUT = "total_timeout"
    """`Limits.total_s` expired while the agent ran; recorded calls are built into traces."""
    AGENT_MEMORY = "agent_memory"
    """The agent's programs exceeded the sandbox's memory."""
    AGENT_DISK = "agent_disk"
    """The agent's programs exceeded the sandbox's disk."""
    EVALUATOR = "evaluator"
    """The evaluator failed, twice."""
    EVAL_TIMEOUT = "eval_timeout"
    """`Limits.eval_s` expired without a verdict, twice."""
    TASK = "task"
    """The task is invalid: no node can run it."""


class Handling(msgspec.Struct, frozen=True):
    """Consequences of one cause of failure."""

    boundary: Boundary
    """Boundary that the failure is reported at."""
    retries: int | None
    """Number of retries; None: retried until `Group.retry_s` is over, without spending attempts."""
    elsewhere: bool = False
    """Whether the session is retried on another node, if there is one."""
    evaluated: bool = False
    """Whether the session counts for the policy: evaluated and trained on; else masked."""


HANDLING: dict[Cause, Handling] = {
    Cause.SANDBOX: Handling(Boundary.RUNTIME, None, elsewhere=True),
    Cause.NETWORK: Handling(Boundary.RUNTIME, None, elsewhere=True),
    Cause.IMAGE: Handling(Boundary.RUNTIME, 1, elsewhere=True),
    Cause.WORKSPACE: Handling(Boundary.RUNTIME, 1, elsewhere=True),
    Cause.DISK: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.NODE: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.RECORDING: Handling(Boundary.INFRASTRUCTURE, 1, elsewhere=True),
    Cause.RESULT: Handling(Boundary.INFRASTRUCTURE, 0),
    Cause.INIT_TIMEOUT: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.WAIT_TIMEOUT: Handling(Boundary.INFRASTRUCTURE, None),
    Cause.ENGINE: Handling(Boundary.ENGINE, 0),
    Cause.ENGINE_LOST: Handling(Boundary.ENGINE, None, elsewhere=True),
    Cause.INSTALL: Handling(Boundary.HARNESS, 1, elsewhere=True),
    Cause.CRASH: Handling(Boundary.HARNESS, 1),
    Cause.NO_MODEL_CALL: Handling(Boundary.HARNESS, 1),
    Cause.AGENT_TIMEOUT: Handling(Boundary.AGENT, 0, evaluated=True),
    Cause.TOTAL_TIMEOUT: Handling(Boundary.AGENT, 0),
    Cause.AGENT_MEMORY: Handling(Boundary.AGENT, 0, evaluated=True),
    Cause.AGENT_DISK: Handling(Boundary.AGENT, 0, evaluated=True),
    Cause.EVALUATOR: Handling(Boundary.EVALUATOR, 0),
    Cause.EVAL_TIMEOUT: Handling(Boundary.EVALUATOR, 0),
    Cause.TASK: Handling(Boundary.RUNTIME, 0),
}
"""Handling by cause. An evaluation is repeated once before it counts as failed."""
UNKNOWN_CAUSE = {each.boundary: each for each in reversed(HANDLING.values())}
"""Handling of a failure without a cause, by boundary: that of the boundary's first cause."""


def is_pass(reward: float) -> bool:
    """Whether a reward means that the task was solved."""
    return reward >= PASS


def plain_text(text: str) -> str:
    """Write lone surrogates and NUL, which not every store can keep, as escapes."""
    if "\0" not in text and text.isprintable():
        return text
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


class Failure(msgspec.Struct, frozen=True):
    """Reason why a session did not complete."""

    boundary: Boundary
    message: str
    """What happened, as plain text, whatever raised it."""
    cause: Cause | None = None
    """None if only the boundary is known."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "message", plain_text(self.message))


def is_by_agent(status: Status, failure: Failure | None) -> bool:
    """Whether a session ended by what its agent did, which shows that its node works."""
    by_agent = failure is not None and failure.boundary is Boundary.AGENT
    return status is Status.COMPLETED or by_agent


class SpentLimit(StrEnum):
    """Budget that was spent when a session ended: one of `Limits`, or the recording's size."""

    MAX_TURNS = "max_turns"
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    CALLS_S = "calls_s"
    MAX_RECORDING = "max_recording"


# --------------------------------------------------------------------------- results
class Reward(msgspec.Struct, frozen=True):
    """Score of a session, and its named parts."""

    value: float
    parts: dict[str, float] = {}
    per_trace: tuple[float, ...] = ()
    """Values by trace, if the evaluator scores traces; else empty."""
    per_call: dict[int, float] = {}
    """Values of all recorded calls by number, in their order, if the evaluator scores calls; else
    empty."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one session: traces, reward, ledger and timings."""

    session: str
    task: str
    sample: int
    status: Status
    traces: tuple[Trace, ...]
    ledger: Ledger
    reward: Reward | None = None
    """None if the session failed for a reason that does not count for the policy."""
    report: dict[str, Any] = {}
    """Details from the evaluator."""
    failure: Failure | None = None
    spent: SpentLimit | None = None
    """Budget that cut off its model calls; the agent then ended by itself, so this is no failure.
    An agent that was stopped from outside has a `failure` at the boundary AGENT."""
    seconds: dict[str, float] = {}
    """Wall-clock seconds per stage."""
    engine_s: float | None = None
    """Seconds in which at least one of its model calls was at the engine; None in results of older
    releases."""
    prompt_tokens: int | None = None
    """Tokens of the prompts of its model calls; None in results of older releases."""
    harness: str = ""
    """Name of the task's harness; empty in results of older versions."""
    patch: str = ""
    """SHA-256, in hex, of what the agent changed, stored beside its recording; empty if the session
    ended before, and in results of older versions."""
    revision: int = 0
    """Number of times that another verdict has changed the reward."""
