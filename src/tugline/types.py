"""The nouns of Tugline: frozen values that every other part speaks in.

They import nothing of ours, hold no behaviour beyond their own consistency, and are what
processes exchange. Token arrays are contiguous numpy buffers (``int32`` ids, ``float32``
logprobs), never Python lists. Everything else is a `msgspec.Struct`, so one definition serves
memory, msgpack on disk and JSON on the wire (`encode` and `decode` below).

Invariants carried here: I1 (a `Trace` names the calls its tokens came from), I2 (`Ledger` and the
`Reason` enum), I5 (`Failure` names the boundary it crossed).
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, shape ``(n,)``, contiguous."""

Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities of sampled tokens, shape ``(n,)``."""

Mask = npt.NDArray[np.bool_]
"""True where a token is trained on, shape ``(n,)``."""


def shared_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return how many leading items two arrays have in common.

    Arrays that are views of the same memory are not compared.
    """
    n = min(len(a), len(b))
    if not n or _start_of(a) == _start_of(b):
        return n
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _start_of(array: npt.NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    address: int = array.__array_interface__["data"][0]
    return address, array.strides


# --------------------------------------------------------------------------- status and failure
class Status(StrEnum):
    """Where a session is. `TRANSITIONS` says what may follow, `TERMINAL` what is final."""

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

_ENDS = frozenset({Status.FAILED, Status.TIMED_OUT, Status.CANCELLED})
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.INIT}) | _ENDS,
    Status.INIT: frozenset({Status.READY, Status.QUEUED}) | _ENDS,
    Status.READY: frozenset({Status.RUN, Status.QUEUED}) | _ENDS,
    Status.RUN: frozenset({Status.BUILD, Status.QUEUED}) | _ENDS,
    Status.BUILD: frozenset({Status.EVAL, Status.QUEUED}) | _ENDS,
    Status.EVAL: frozenset({Status.COMPLETED, Status.QUEUED}) | _ENDS,
    **{status: frozenset() for status in TERMINAL},
}
"""A lost lease leads any running state back to QUEUED."""


class Boundary(StrEnum):
    """Whose failure it is; decides who retries and whether the policy is charged for it."""

    ENGINE = "engine"
    HARNESS = "harness"
    AGENT = "agent"
    RUNTIME = "runtime"
    EVALUATOR = "evaluator"
    INFRASTRUCTURE = "infrastructure"


RETRIES: dict[Boundary, int | None] = {
    Boundary.INFRASTRUCTURE: None,
    Boundary.RUNTIME: None,
    Boundary.HARNESS: 1,
    Boundary.ENGINE: 0,
    Boundary.AGENT: 0,
    Boundary.EVALUATOR: 0,
}
"""How often a session is tried again after a failure there; None: as often as its task allows.

An evaluation is repeated by itself, before it counts as failed.
"""


class Cause(StrEnum):
    """What went wrong, closer than the boundary where it showed; `HANDLING` says what follows."""

    SANDBOX = "sandbox"
    """The place for the agent, or for its judge, could not be made or was lost."""
    NETWORK = "network"
    """The way from the sandbox to the gateway, or to an allowed host, could not be made."""
    IMAGE = "image"
    """A container image is missing, cannot be pulled, or its Dockerfile is broken."""
    WORKSPACE = "workspace"
    """A repository, commit or folder that the task begins with cannot be had."""
    DISK = "disk"
    """The disk of the node is full."""
    NODE = "node"
    """The node was lost, or broke in a way that nobody foresaw."""
    INIT_TIMEOUT = "init_timeout"
    """`Limits.init_s` was over before the agent could begin."""
    WAIT_TIMEOUT = "wait_timeout"
    """`Limits.total_s` was over while the session waited, or while its traces were built."""
    ENGINE = "engine"
    """The model server failed, or refused what the harness asked."""
    INSTALL = "install"
    """The agent program cannot be had or configured."""
    CRASH = "crash"
    """The agent program broke, by what it wrote and what was recorded of it."""
    AGENT_TIMEOUT = "agent_timeout"
    """`Limits.agent_s` was over; what was captured is built, and what was done is judged."""
    TOTAL_TIMEOUT = "total_timeout"
    """`Limits.total_s` was over while the agent was at work; what was captured is built."""
    AGENT_MEMORY = "agent_memory"
    """The agent's programs took more memory than the sandbox gives."""
    AGENT_DISK = "agent_disk"
    """The agent's programs wrote more than the sandbox gives."""
    EVALUATOR = "evaluator"
    """The evaluator broke, twice."""
    EVAL_TIMEOUT = "eval_timeout"
    """`Limits.eval_s` was over without a verdict, twice."""
    TASK = "task"
    """The task itself is wrong: no node can do it."""


class Handling(msgspec.Struct, frozen=True):
    """What becomes of a session that failed for some cause."""

    boundary: Boundary
    """Where such a failure shows."""
    retries: int | None
    """How often it is tried again; None: as often as `Group.attempts` allows."""
    elsewhere: bool = False
    """Whether another node gets it, where there is one."""
    judged: bool = False
    """Whether its outcome counts for the policy: it is evaluated and trained on; else masked."""


HANDLING: dict[Cause, Handling] = {
    Cause.SANDBOX: Handling(Boundary.RUNTIME, None, elsewhere=True),
    Cause.NETWORK: Handling(Boundary.RUNTIME, None, elsewhere=True),
    Cause.IMAGE: Handling(Boundary.RUNTIME, 1, elsewhere=True),
    Cause.WORKSPACE: Handling(Boundary.RUNTIME, 1, elsewhere=True),
    Cause.DISK: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.NODE: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.INIT_TIMEOUT: Handling(Boundary.INFRASTRUCTURE, None, elsewhere=True),
    Cause.WAIT_TIMEOUT: Handling(Boundary.INFRASTRUCTURE, None),
    Cause.ENGINE: Handling(Boundary.ENGINE, 0),
    Cause.INSTALL: Handling(Boundary.HARNESS, 1, elsewhere=True),
    Cause.CRASH: Handling(Boundary.HARNESS, 1),
    Cause.AGENT_TIMEOUT: Handling(Boundary.AGENT, 0, judged=True),
    Cause.TOTAL_TIMEOUT: Handling(Boundary.AGENT, 0),
    Cause.AGENT_MEMORY: Handling(Boundary.AGENT, 0, judged=True),
    Cause.AGENT_DISK: Handling(Boundary.AGENT, 0, judged=True),
    Cause.EVALUATOR: Handling(Boundary.EVALUATOR, 0),
    Cause.EVAL_TIMEOUT: Handling(Boundary.EVALUATOR, 0),
    Cause.TASK: Handling(Boundary.RUNTIME, 0),
}
"""One row for every cause. An evaluation is repeated by itself, before it counts as failed."""


class Failure(msgspec.Struct, frozen=True):
    """Why a session did not complete."""

    boundary: Boundary
    message: str
    cause: Cause | None = None
    """None in what was recorded before causes were told apart."""


# --------------------------------------------------------------------------- what is asked for
class PluginSpec(msgspec.Struct, frozen=True):
    """A named plug-in (harness, runtime, evaluator or builder) with its options."""

    name: str
    """Built in, an entry point of an installed package, or ``module:Class``."""
    options: dict[str, Any] = {}
    """What it is made with; each part has its own."""


class Workspace(msgspec.Struct, frozen=True):
    """What an agent finds in its folder besides `Task.files`, which are laid over it.

    Paths are those of the node. Each session sees a copy-on-write view; nothing is changed here.
    """

    image: str | None = None
    """Container image to run in; without `repo` and `folder`, also where the files come from."""
    build: str | None = None
    """In place of `image`: folder with a Dockerfile to make one from."""
    repo: str | None = None
    """Git repository: URL or path."""
    commit: str | None = None
    """Of `repo`: what is checked out, as a full hash, a tag or a branch. Without it, of the image's
    own repository: a full hash in the history of its HEAD, or ``HEAD``; nothing later is kept."""
    folder: str | None = None
    """In place of `repo`: folder whose files are seen."""
    path: str | None = None
    """Where the agent finds them; None: the image's own working folder, or ``/workspace``."""


class Limits(msgspec.Struct, frozen=True):
    """Budgets of one session. Times are seconds of that stage alone; None means no limit."""

    init_s: float = 60.0
    """To make the runtime and start the harness, without its installation."""
    agent_s: float = 600.0
    """For the agent to work."""
    eval_s: float = 120.0
    """For the evaluator to judge."""
    max_turns: int | None = None
    """Model calls a session may make."""
    max_sampled_tokens: int | None = None
    """Tokens a session may sample."""
    total_s: float | None = None
    """Seconds from INIT to the end of EVAL: a safety net, for which also waiting counts."""
    calls_s: float | None = None
    """Seconds after the first model call, after which more are refused: an end before `agent_s`."""


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. In a contract, None leaves the choice to the harness."""

    temperature: float | None = None
    """0 is greedy, 1 the model's own distribution."""
    top_p: float | None = None
    """1 is off."""
    top_k: int | None = None
    """0 is off."""
    max_tokens: int | None = None
    """Tokens that one answer may have."""
    seed: int | None = None
    """Seed of a session: each of its calls derives its own from this and its number."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""


class Policy(StrEnum):
    """What happens when a harness asks for other sampling than the contract says."""

    ENFORCE = "enforce"
    """The contract is used, the wish recorded."""
    ALLOW = "allow"
    """The wish is used, the contract where there is none."""
    REFUSE = "refuse"
    """The call is refused, naming the field."""


class Stale(StrEnum):
    """What happens to a session that runs while the weights move on too far."""

    MARK = "mark"
    """It goes on; its trace says which version each token has."""
    ABORT = "abort"
    """It is stopped and starts again with the new weights, as long as it has attempts."""


class Group(msgspec.Struct, frozen=True):
    """How the samples of a task belong together. None means no bound."""

    enough: int | None = None
    """Usable samples (judged ones) after which the rest is cancelled."""
    deadline_s: float | None = None
    """Seconds from submission after which what is there is released, and the rest cancelled."""
    attempts: int = 3
    """How often a sample may be tried when the infrastructure fails it."""
    max_staleness: int | None = None
    """How many weight versions a session may fall behind the one it started with."""
    on_stale: Stale = Stale.MARK
    """What happens to one that falls further behind."""


class Callback(msgspec.Struct, frozen=True):
    """Where to tell of each result and of the end of the group; signed by the server."""

    url: str
    """``http://`` or ``https://``."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, to be attempted `samples` times (the GRPO group)."""

    id: str
    """Chosen by who submits; the same task submitted again is the same task."""
    instruction: str
    """What the agent is told to do."""
    harness: PluginSpec
    """The agent program."""
    evaluator: PluginSpec
    """Who judges what it did."""
    runtime: PluginSpec = PluginSpec("auto")
    """The place where it runs."""
    workspace: Workspace = Workspace()
    """Repository, folder or image to begin with."""
    builder: PluginSpec = PluginSpec("prefix_merging")
    """How its model calls become traces."""
    files: dict[str, str] = {}
    """Initial workspace: relative POSIX path to text."""
    samples: int = 1
    """Sessions, each an attempt of its own."""
    limits: Limits = Limits()
    """Budgets of each session."""
    sampling: Sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0)
    """The sampling contract; a field that is None leaves the choice to the harness."""
    sampling_policy: Policy = Policy.ENFORCE
    """What happens when the harness asks for other sampling."""
    tenant: str = "default"
    """Who pays: tenants share the nodes by their weights."""
    priority: int = 0
    """-10 to 10: each step puts a task one minute further ahead in its tenant's line."""
    group: Group = Group()
    """When the samples together are enough, and what becomes of the rest."""
    callback: Callback | None = None
    """Where to tell of results; without it they are read from the server."""
    tags: dict[str, str] = {}
    """For you: to find tasks by, and kept with their results."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one sample of a task. `epoch` fences results of lost leases."""

    id: str
    task: str
    sample: int
    attempt: int = 0
    epoch: int = 0
    status: Status = Status.QUEUED


# --------------------------------------------------------------------------- one model call
class Role(StrEnum):
    """Who speaks. `developer` is kept apart from `system` until a renderer maps it."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True):
    """A call the model asked for; `arguments` is the JSON text exactly as it was written."""

    id: str
    name: str
    arguments: str


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """A picture inside a message: ``data:`` or ``https:`` URL, and where in the text it stands."""

    url: str
    at: int = 0
    """Characters of the message's `content` before it."""
    detail: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the URL in hex: the name of the picture in recordings and traces."""
        return hashlib.sha256(self.url.encode()).hexdigest()


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dialect-neutral message. `content` has its text parts joined."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    images: tuple[Image, ...] = ()
    failed: bool = False
    """A tool result that the harness marked as an error; templates do not show it."""


class ToolKind(StrEnum):
    """How a dialect declares and calls a tool; the model sees a function in every case."""

    FUNCTION = "function"
    CUSTOM = "custom"
    """Freeform text: for the model, a function with the one string argument ``input``."""
    LOCAL_SHELL = "local_shell"


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call; `parameters` is its JSON schema."""

    name: str
    """As the model sees it: ``namespace__name`` for a namespaced tool."""
    description: str
    parameters: dict[str, Any]
    kind: ToolKind = ToolKind.FUNCTION
    namespace: str | None = None


class Finish(StrEnum):
    """Why sampling stopped, as the engine said it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Mode(StrEnum):
    """Who makes the prompt's ids."""

    EXACT = "exact"
    """The gateway: ids in, ids out."""
    OBSERVED = "observed"
    """The engine's template; its ids are read back."""
    TEXT = "text"
    """Nobody tells: nothing of it can be trained on."""


class LogprobMeaning(StrEnum):
    """Of which distribution the captured logprobs are."""

    PROCESSED = "processed"
    """The one sampled from: after temperature and truncation."""
    RAW = "raw"
    """The model's own, before temperature; the same at temperature 1 without truncation."""


class TraceKind(StrEnum):
    """What a token sequence, or a call, is within its session."""

    MAIN = "main"
    BRANCH = "branch"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"


class Outcome(StrEnum):
    """What became of the answer on its way to the harness."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    ENGINE_LOST = "engine_lost"


class Branch(StrEnum):
    """Why a call does not extend its parent token for token."""

    HISTORY_EDITED = "history_edited"
    """A message that was sent before now says something else."""
    HARNESS_ASSISTANT = "harness_assistant"
    """The new messages hold an answer that the model did not give."""
    TOOLS_CHANGED = "tools_changed"
    CALL_REPAIRED = "call_repaired"
    """The echoed answer has the tool calls the model made, but mended or renamed."""
    TURN_DELETED = "turn_deleted"
    """Answers are gone from the history that remains the same otherwise."""
    RESULTS_REORDERED = "results_reordered"
    """The results of parallel tool calls changed places."""
    COMPACTED = "compacted"
    """The harness replaced its history by a summary."""
    NEW_THREAD = "new_thread"
    """Another conversation of the same session, such as a sub-agent's or a title request."""
    RENDERER_REFUSED = "renderer_refused"
    """The template cannot continue these ids by these messages."""
    ENGINE_RERENDERED = "engine_rerendered"
    """Observed mode: the engine's prompt ids do not extend what was sampled."""


class EchoChange(StrEnum):
    """What a harness changed in the echo of an answer without changing its meaning."""

    ARGUMENTS = "arguments"
    """Tool arguments written as other JSON text of the same value."""
    REASONING = "reasoning"
    """Reasoning left out, shortened or moved to another field."""
    IDS = "ids"
    """Tool calls were given other ids."""
    TEXT = "text"
    """Blank space around the text."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens ``[start, end)`` were drawn under policy `version`."""

    version: int
    start: int
    end: int


class Timings(msgspec.Struct, frozen=True):
    """Unix seconds; None where the moment never came."""

    received: float
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as it happened. Lengths of `sampled_ids` and `logprobs` are equal."""

    session: str
    number: int
    """Position in the session, from 0."""
    parent: int | None = None
    """Number of the call whose exact ids this prompt starts with, or nearest to it on a branch."""
    branch: Branch | None = None
    """Set when this call does not extend `parent` exactly; None for an exact continuation."""
    echo_changes: tuple[EchoChange, ...] = ()
    """What the echo of the parent's answer changed without changing its meaning."""
    kind: TraceKind = TraceKind.MAIN
    thread: str | None = None
    """The harness's own id of the conversation, where it sends one."""
    parent_thread: str | None = None
    dialect: str
    mode: Mode = Mode.EXACT
    logprob_meaning: LogprobMeaning = LogprobMeaning.PROCESSED
    thinking_retention: str = ""
    """How long reasoning stays in the context; empty where the engine decides."""
    messages: tuple[Message, ...]
    """Messages that this request added to its parent's conversation (all of them on a branch)."""
    answer: Message | None = None
    """What the harness was told, as far as it was told; None if that was nothing."""
    tools: tuple[Tool, ...] = ()
    sampling: Sampling
    """As enforced, not as asked."""
    requested: Sampling = Sampling()
    constrained: bool = False
    """Whether a grammar or a ban held the answer: its logprobs are not the policy's alone."""
    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Logprobs
    unreported_tokens: int = 0
    """Sampled tokens that the engine counted without telling their ids (text-only mode)."""
    versions: tuple[VersionSpan, ...]
    finish: Finish
    stop: str | None = None
    """The stop string that ended the answer."""
    outcome: Outcome = Outcome.COMPLETE
    replayed: bool = False
    """Told from another session's recording: sampled there, and not to be trained on here too."""
    engine: str
    replicas: tuple[str, ...] = ()
    """Addresses that sampled this answer, in order; more than one after a fault in the middle."""
    timings: Timings
    request: bytes = b""
    """Raw request body, for the inspector."""
    response: bytes = b""


# --------------------------------------------------------------------------- what is trained on
class Reason(StrEnum):
    """Why a sampled token is not trained on. A code that is not here cannot be written."""

    CLIENT_GONE = "client_gone"
    """The harness hung up and never saw the answer."""
    ABORTED = "aborted"
    """The engine was told to stop in the middle of the answer."""
    OVER_LENGTH = "over_length"
    """Beyond the trainer's longest sequence."""
    UNMERGED = "unmerged"
    """The builder's rule for merging found no place for the call and gave up on it."""
    SESSION_FAILED = "session_failed"
    """The session's outcome says nothing about the policy (see `Boundary`)."""
    STALE = "stale"
    """Sampled under a policy version older than the trainer accepts."""
    NO_SIGNAL = "no_signal"
    """Every session of the group earned the same, and the trainer was told to skip such groups."""
    HELD_OUT = "held_out"
    """Sampled to measure the policy, not to train it."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105 - no secret
    """The engine told the answer's text only."""
    SIDE_CALL = "side_call"
    """A title, a router's choice or a summary beside the task."""
    CONSTRAINED = "constrained"
    """A grammar or a ban chose among what the policy would have said; see `Call.constrained`."""
    REPLAYED = "replayed"
    """Sampled in the session that this one was forked from, which has it to train on."""


class Ledger(msgspec.Struct, frozen=True):
    """Conservation of tokens (I2): ``sampled == trained + masked + dropped``."""

    sampled: int = 0
    trained: int = 0
    masked: dict[Reason, int] = {}
    """Kept in a trace as context, without loss."""
    dropped: dict[Reason, int] = {}
    """In no trace at all."""

    @property
    def balanced(self) -> bool:
        """Whether every sampled token is accounted for exactly once."""
        return self.sampled == (
            self.trained + sum(self.masked.values()) + sum(self.dropped.values())
        )


class Span(msgspec.Struct, frozen=True):
    """Trace tokens ``[start, end)`` were sampled by `call` under policy `version`."""

    call: int
    start: int
    end: int
    version: int
    masked: Reason | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence to train on; arrays all have shape ``(n,)``.

    ``logprobs[i]`` is the captured log probability of ``ids[i]`` given ``ids[:i]`` where a span
    covers ``i``, and 0 elsewhere. ``mask[i]`` is True where ``ids[i]`` is trained on.
    """

    ids: Ids
    mask: Mask
    logprobs: Logprobs
    spans: tuple[Span, ...]
    kind: TraceKind = TraceKind.MAIN
    parent: int | None = None
    """Index in the trajectory of the trace this one forked from, or was started by."""
    shared: int = 0
    """How many ids at the beginning are those of the parent, so that their work can be reused."""
    thread: str | None = None
    """The harness's own id of the conversation, where it sends one."""
    thinking_retention: str = ""
    """How long reasoning stayed in the context; empty where the engine decided."""
    exact: bool = True
    """False where the context is not, id for id, the one that was sampled in (I1)."""
    images: tuple[str, ...] = ()
    """SHA-256, in hex, of the pictures in the context, in order; the recording has their data."""


class Reward(msgspec.Struct, frozen=True):
    """The outcome of a session, with named parts for the curious."""

    value: float
    parts: dict[str, float] = {}
    per_trace: tuple[float, ...] = ()
    """One number for each trace of the trajectory, where an evaluator judged them; else empty."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a trainer may learn from one session."""

    session: str
    task: str
    sample: int
    status: Status
    traces: tuple[Trace, ...]
    ledger: Ledger
    reward: Reward | None = None
    """None when the session failed for a reason that is not the policy's."""
    report: dict[str, Any] = {}
    """What the evaluator saw."""
    failure: Failure | None = None
    seconds: dict[str, float] = {}
    """Wall clock per stage."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Flat arrays for a trainer, one per trace; shapes ``(n,)``.

    `advantages` is 0 where nothing is trained, `versions` -1 where nothing was sampled.
    """

    input_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    versions: Ids
    advantages: Logprobs
    group: str
    session: str


# --------------------------------------------------------------------------- memory <-> bytes
_DTYPES: dict[str, type[np.generic]] = {"i": np.int32, "f": np.float32, "?": np.bool_}
T = TypeVar("T")


def _to_wire(value: object) -> object:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        for code, dtype in _DTYPES.items():
            if value.dtype == dtype:
                return code.encode() + np.ascontiguousarray(value).tobytes()
    msg = f"cannot encode {type(value).__name__}"
    raise NotImplementedError(msg)


def _from_wire(kind: Any, value: object) -> object:
    # a ValueError here becomes a msgspec.ValidationError that names the field
    dtype = get_args(get_args(kind)[1])[0]
    code = value[:1] if isinstance(value, bytes) else b""
    if not isinstance(value, bytes) or _DTYPES.get(code.decode("latin-1")) is not dtype:
        msg = f"expected an array of {dtype.__name__}"
        raise ValueError(msg)
    return np.frombuffer(value, dtype=dtype, offset=1)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def encode(value: msgspec.Struct) -> bytes:
    """Msgpack bytes of any noun; arrays travel as raw little-endian buffers."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Rebuild a noun from `encode`; arrays are read-only views. Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_wire)
