"""Recorded model calls. Messages and tools do not depend on a dialect."""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from tugline.types.arrays import Experts, Ids, Kept, Logprobs
from tugline.types.task import MalformedCalls, Sampling


# --------------------------------------------------------------------------- messages and tools
class Role(StrEnum):
    """Author of a message. `developer` stays distinct from `system` until a renderer maps it."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A tool call by the model; `arguments` is its JSON text, unchanged."""

    id: str
    name: str
    arguments: str


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image in a message, as a ``data:`` or ``https:`` URL."""

    url: str
    at: int = 0
    """Position: number of characters of the message's `content` before the image."""
    detail: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the URL in hex: its name in recordings and traces."""
        return hashlib.sha256(self.url.encode()).hexdigest()


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A message, independent of the dialect. `content` is its text parts, joined."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    images: tuple[Image, ...] = ()
    failed: bool = False
    """Whether the harness marked a tool result as an error; templates do not render it."""


class ToolKind(StrEnum):
    """Kind of a tool in its dialect; the model always sees a function."""

    FUNCTION = "function"
    CUSTOM = "custom"
    """Free-form text: for the model, a function with one string argument, ``input``."""
    LOCAL_SHELL = "local_shell"


class Tool(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A function the model may call; `parameters` is its JSON schema."""

    name: str
    """Name that the model sees: ``namespace__name`` for a namespaced tool."""
    description: str
    parameters: dict[str, Any]
    kind: ToolKind = ToolKind.FUNCTION
    namespace: str | None = None
    strict: bool = False
    """Whether the client requires arguments that match the schema; not enforced in a call without
    `Call.constrained`."""


# --------------------------------------------------------------------------- calls
class Finish(StrEnum):
    """Reason why sampling stopped, as reported by the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Mode(StrEnum):
    """Origin of the prompt's token ids."""

    EXACT = "exact"
    """Rendered by the gateway: ids in, ids out."""
    OBSERVED = "observed"
    """Rendered by the engine's template and read back."""
    TEXT = "text"
    """Not reported: the call cannot be trained on."""


class LogprobMeaning(StrEnum):
    """Distribution that the recorded logprobs belong to."""

    PROCESSED = "processed"
    """Distribution that was sampled from: after temperature and truncation."""
    RAW = "raw"
    """Model's own distribution, before temperature; equal at temperature 1 without truncation."""


class TraceKind(StrEnum):
    """Role of a token sequence, or a call, within its session."""

    MAIN = "main"
    BRANCH = "branch"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"


class CallOutcome(StrEnum):
    """Whether the response reached the harness."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    ENGINE_LOST = "engine_lost"


class Branch(StrEnum):
    """Reason why a call does not extend its parent token for token."""

    HISTORY_EDITED = "history_edited"
    """The content of an earlier message changed."""
    HARNESS_ASSISTANT = "harness_assistant"
    """The new messages contain a response that the model did not give."""
    TOOLS_CHANGED = "tools_changed"
    CALL_REPAIRED = "call_repaired"
    """The echoed response has the model's tool calls, but repaired or renamed."""
    TURN_DELETED = "turn_deleted"
    """Responses were removed from an otherwise unchanged history."""
    RESULTS_REORDERED = "results_reordered"
    """The results of parallel tool calls changed order."""
    COMPACTED = "compacted"
    """The harness replaced its history with a summary."""
    NEW_THREAD = "new_thread"
    """Another conversation of the same session, such as a sub-agent's or a title request."""
    RENDERER_REFUSED = "renderer_refused"
    """The template cannot extend these ids with these messages."""
    ENGINE_RERENDERED = "engine_rerendered"
    """Observed mode: the engine's prompt ids do not extend the sampled ids."""


class EchoChange(StrEnum):
    """Change in the echo of a response that keeps its meaning."""

    ARGUMENTS = "arguments"
    """Tool arguments are different JSON text with the same value."""
    REASONING = "reasoning"
    """Reasoning is left out, shortened or moved to another field."""
    IDS = "ids"
    """Tool calls have different ids."""
    TEXT = "text"
    """The text of a response with tool calls is left out, or white space around it differs."""


class Reason(StrEnum):
    """Reason why a sampled token is not trained on. The list is closed."""

    CLIENT_GONE = "client_gone"
    """The harness disconnected and never received the response."""
    ABORTED = "aborted"
    """The request was aborted before the response was complete."""
    OVER_LENGTH = "over_length"
    """Beyond the trainer's maximum sequence length."""
    UNMERGED = "unmerged"
    """The builder's merging rule could not place the call."""
    SESSION_FAILED = "session_failed"
    """The session failed for a reason that does not count for the policy (see `Handling`)."""
    STALE = "stale"
    """Sampled under a policy version older than the trainer accepts."""
    NO_SIGNAL = "no_signal"
    """All sessions of the group have the same reward, so the trainer leaves them out."""
    TRUNCATED = "truncated"
    """The answer ended at its token limit, or the session at one of its limits, and the trainer
    leaves such answers out."""
    MALFORMED = "malformed"
    """The answer has a malformed tool call, and the trainer leaves such answers out."""
    REPEATED = "repeated"
    """The answer repeats the tool calls of those before it, and the trainer leaves such answers
    out."""
    NON_FINITE = "non_finite"
    """The update was skipped: its loss or gradient was not finite."""
    UNREPRODUCIBLE = "unreproducible"
    """No forward pass reproduces the logprob: sampling was greedy, or truncated to tokens that the
    engine did not report."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105 - no secret
    """The engine reported text only."""
    BEHIND_STOP = "behind_stop"
    """After a stop string that the client requested, so not part of the answer."""
    SIDE_CALL = "side_call"
    """Sampled in a side call, such as a title, a routing decision or a summary."""
    CONSTRAINED = "constrained"
    """A grammar or a token ban constrained the response; see `Call.constrained`."""
    IMAGES = "images"
    """Sampled with an image in the context, which no trainer here reads yet."""
    NO_ROUTES = "no_routes"
    """The engine did not report, or wrongly, the experts of every token before it."""
    ROUTES_CHANGED = "routes_changed"
    """Tokens before it were computed with other experts later in the same answer."""
    REPLAYED = "replayed"
    """Sampled in the session that this one was forked from, and trained on there."""


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Sampled tokens ``[start, end)`` were sampled under policy `version`."""

    version: int
    start: int
    end: int


class MaskedSpan(msgspec.Struct, frozen=True, gc=False):
    """Sampled tokens ``[start, end)`` cannot be trained on."""

    reason: Reason
    start: int
    end: int


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Unix seconds; None for events that did not happen."""

    received: float
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A model call as recorded. `sampled_ids` and `logprobs` have equal lengths."""

    session: str
    number: int
    """Position in the session, from 0."""
    parent: int | None = None
    """Number of the call whose exact ids this prompt starts with; on a branch, the nearest call."""
    branch: Branch | None = None
    """Set when this call does not extend `parent` exactly; None for an exact continuation."""
    echo_changes: tuple[EchoChange, ...] = ()
    """Changes in the echo of the parent's response that keep its meaning."""
    kind: TraceKind = TraceKind.MAIN
    thread: str | None = None
    """The harness's own conversation id, if it sends one."""
    parent_thread: str | None = None
    dialect: str
    mode: Mode = Mode.EXACT
    logprob_meaning: LogprobMeaning = LogprobMeaning.PROCESSED
    thinking_retention: str = ""
    """Turns whose reasoning stays in the context; empty if the engine decides."""
    raw_prompt: bool = False
    """Whether the client sent the prompt as text or ids, without messages: no template rendered it,
    and the answer is plain text."""
    messages: tuple[Message, ...]
    """Messages that this request added to its parent's conversation (all of them on a branch)."""
    answer: Message | None = None
    """The response as far as the harness received it; None if it received nothing."""
    tools: tuple[Tool, ...] = ()
    sampling: Sampling
    """Sampling parameters that were used."""
    requested: Sampling = Sampling()
    """Sampling parameters that the harness requested."""
    constrained: bool = False
    """Whether a grammar, a token ban or the engine's forced tool choice constrained the response,
    and so its logprobs."""
    forbidden_calls: int = 0
    """Number of tool calls in the response although the request forbade them (``tool_choice:
    none``) where nothing could ban them; the harness received them as text."""
    prompt_ids: Ids
    """All ids before the sampled ones; the last may begin the answer: see `forced`, `resumed`."""
    forced: int = 0
    """Number of ids that the gateway inserted before the `resumed` ones to begin a tool call."""
    resumed: int = 0
    """Number of ids at the end of the prompt sampled in earlier calls; this call completes them."""
    sampled_ids: Ids
    logprobs: Logprobs
    experts: Experts | None = None
    """Experts of the leading tokens of prompt and answer, usually of all but the last; None for a
    model without experts, or if the engine does not report them. Recordings before this field have
    none."""
    kept: Kept | None = None
    """Sets from which the sampled tokens were chosen, if the engine reports them."""
    masked: tuple[MaskedSpan, ...] = ()
    """Sampled tokens whose experts are not those of `experts`, in order."""
    unreported_tokens: int = 0
    """Sampled tokens without ids: the engine only counted them (text mode), or they were cut off
    after a stop string."""
    unreported_prompt_tokens: int = 0
    """Tokens of the prompt that the engine counted without reporting their ids (text mode)."""
    versions: tuple[VersionSpan, ...]
    finish: Finish
    stop: str | None = None
    """The stop string that ended the response."""
    outcome: CallOutcome = CallOutcome.COMPLETE
    malformed: MalformedCalls | None = None
    """How malformed tool calls in the response were delivered; None if there are none."""
    replayed: bool = False
    """Whether the call was copied from another session, where it was sampled and trained on."""
    engine: str
    replicas: tuple[str, ...] = ()
    """Addresses that sampled this response, in order; more than one after a failover."""
    timings: Timings


# --------------------------------------------------------------------------- time
def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each with its start and its end."""
    total = 0.0
    covered: float | None = None
    for start, end in sorted(intervals):
        if covered is None or start > covered:
            covered = start
        if end > covered:
            total += end - covered
            covered = end
    return total


def measure_engine(calls: Iterable[Call]) -> float:
    """Return the seconds in which at least one of these calls was at the engine."""
    return union_seconds(
        (call.timings.sent, call.timings.last_token)
        for call in calls
        if not call.replayed
        and call.timings.sent is not None
        and call.timings.last_token is not None
    )


def count_prompt_tokens(calls: Iterable[Call]) -> int:
    """Return the tokens of the prompts of these calls; each call counts its whole prompt."""
    return sum(len(call.prompt_ids) + call.unreported_prompt_tokens for call in calls)
