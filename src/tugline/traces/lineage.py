"""Continuation of calls, computed from token ids instead of the recorded parents.

The builders, `tugline verify`, the viewer, exports and replay all use this module, so they agree
(I1). A call joins a chain only if its prompt begins with all of the chain's ids and images, and was
computed with the same experts. Prompts that are views of one buffer, as
`tugline.recording.file.read` returns them, are not compared again, so the cost is linear in the
unique ids (I7).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from tugline.errors import CaptureError
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Experts,
    Finish,
    Mode,
    Reason,
    TraceKind,
    shared_prefix,
)


class Continuation(StrEnum):
    """Relation of a call's prompt to its parent."""

    FIRST = "first"
    """The call has no parent: it starts a conversation."""
    EXACT = "exact"
    """The prompt begins with all ids of the parent, prompt and answer."""
    ECHO_CHANGED = "echo_changed"
    """Like `EXACT`, but the harness echoed the parent's answer in another form."""
    FORKED = "forked"
    """The prompt differs from the parent's ids, for the recorded reason."""
    BROKEN = "broken"
    """The prompt differs from the parent's ids, contrary to the record."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105 - no secret
    """The engine reported no ids, so nothing can be compared."""


class Lineage(NamedTuple):
    """A call's continuation, and the number of ids shared with its parent."""

    continuation: Continuation
    shared: int = 0
    """Number of leading prompt ids shared with the parent."""
    reasons: tuple[str, ...] = ()
    """Echo changes, or the reason why the call forks or is broken: a `Branch`, ``client_gone``,
    ``routes_changed``, ``ids_differ`` or ``parent_missing``."""


def trace_lineage(call: Call, parent: Call | None) -> Lineage:
    """Compare `call` with its recorded parent; `parent` is None if it was not recorded."""
    if call.mode is Mode.TEXT or (parent is not None and parent.mode is Mode.TEXT):
        return Lineage(Continuation.NO_TOKEN_IDS)
    branch = () if call.branch is None else (call.branch.value,)
    if call.parent is None:
        return Lineage(Continuation.FIRST, 0, branch)
    if parent is None:
        return Lineage(Continuation.BROKEN, 0, ("parent_missing",))
    shared = count_shared_ids(call, parent)
    if branch:
        return Lineage(Continuation.FORKED, shared, branch)
    if shared == count_ids(parent) and not has_same_experts(call.experts, parent.experts):
        return Lineage(Continuation.FORKED, shared, (Reason.ROUTES_CHANGED.value,))
    if shared == count_ids(parent):
        changes = tuple(change.value for change in call.echo_changes)
        kind = Continuation.ECHO_CHANGED if changes else Continuation.EXACT
        return Lineage(kind, shared, changes)
    if parent.outcome is CallOutcome.CLIENT_GONE and shared >= len(parent.prompt_ids):
        return Lineage(Continuation.FORKED, shared, ("client_gone",))
    return Lineage(Continuation.BROKEN, shared, ("ids_differ",))


def count_ids(call: Call) -> int:
    """Return the number of ids of a call, prompt and answer."""
    return len(call.prompt_ids) + len(call.sampled_ids)


def count_shared_ids(call: Call, parent: Call) -> int:
    """Return the number of leading prompt ids of `call` shared with `parent` (prompt, answer)."""
    size = len(parent.prompt_ids)
    shared = shared_prefix(parent.prompt_ids, call.prompt_ids)
    if shared < size:
        return shared
    return size + shared_prefix(parent.sampled_ids, call.prompt_ids[size:])


def extends(call: Call, parent: Call) -> bool:
    """Whether the prompt of `call` begins with all ids of `parent`, prompt then answer."""
    end = count_ids(parent)
    if len(call.prompt_ids) < end:
        return False
    last = parent.sampled_ids if len(parent.sampled_ids) else parent.prompt_ids
    if end and call.prompt_ids[end - 1] != last[-1]:
        return False  # most calls that do not extend differ here
    return count_shared_ids(call, parent) == end


def has_same_experts(first: Experts | None, second: Experts | None) -> bool:
    """Whether the tokens of which both calls have experts have the same ones."""
    if first is None or second is None:
        return True
    return shared_prefix(first, second) == min(len(first), len(second))


def adds_to_parent(call: Call) -> bool:
    """Whether `call.messages` are only those added to its parent's conversation.

    Otherwise they are a whole conversation. A prompt that the engine rendered differently continues
    the conversation, but not the ids. A raw prompt is whole and has no messages.
    """
    raw = call.raw_prompt and not call.resumed
    return not raw and call.parent is not None and call.branch in {None, Branch.ENGINE_RERENDERED}


# --------------------------------------------------------------------------- exact chains
class Answer(NamedTuple):
    """A call's answer at its position in a trace."""

    call: Call
    start: int
    """Index of the answer's first token in the trace."""
    masked: Reason | None
    """Reason why the answer is not trained; None if it is trained."""
    images: tuple[str, ...]
    """Digests of the images in the prompt, in order."""
    repeats: int = 0
    """Number of answers directly before this one with the same tool calls."""


@dataclass(slots=True, eq=False)
class Chain:
    """Calls whose prompts each begin with all ids of the previous call."""

    kind: TraceKind
    forked_after: int | None
    """Number of the call that this chain follows; None for a new conversation."""
    calls: list[Call] = field(default_factory=list)
    images: list[tuple[str, ...]] = field(default_factory=list)
    """Digests of the images in each call's prompt, in order."""
    repeats: list[int] = field(default_factory=list)
    """Number of answers directly before each call's with the same tool calls."""

    experts: Experts | None = None
    """Experts of the chain's leading tokens, as far as any of its calls has them."""

    def add(self, call: Call, images: tuple[str, ...], repeats: int) -> None:
        """Append a call that extends this chain."""
        self.calls.append(call)
        self.images.append(images)
        self.repeats.append(repeats)
        known = 0 if self.experts is None else len(self.experts)
        if call.experts is not None and len(call.experts) > known:
            self.experts = call.experts

    def is_extended_by(self, call: Call, images: tuple[str, ...]) -> bool:
        """Whether the prompt of `call` begins with all ids and images of this chain.

        Its tokens must also have been computed with the same experts, where both are known. Side
        calls extend only side calls, so that a title request during a conversation does not
        split the conversation.
        """
        tip = self.calls[-1]
        return (
            (call.kind is TraceKind.SIDE) == (tip.kind is TraceKind.SIDE)
            and images[: len(self.images[-1])] == self.images[-1]
            and extends(call, tip)
            and has_same_experts(call.experts, self.experts)
        )

    def place_answers(self, *, train_side: bool, train_images: bool) -> list[Answer]:
        """Return the chain's answers with their positions in its ids."""
        answers = []
        added = zip(self.calls, self.images, self.repeats, strict=True)
        for call, images, repeats in added:
            extended = call is not self.calls[-1]
            masked = mask_reason(call, extended=extended, train_side=train_side)
            if masked is None and images and not train_images:
                masked = Reason.IMAGES
            answers.append(Answer(call, len(call.prompt_ids), masked, images, repeats))
        return answers


def mask_reason(call: Call, *, extended: bool, train_side: bool) -> Reason | None:
    """Return the reason why an answer is not trained; None if it is trained.

    An answer whose client disconnected is masked unless a later prompt extends it, which proves
    that the harness received it. An incomplete answer of a lost engine is trained, like an answer
    truncated by length.
    """
    if call.replayed:
        return Reason.REPLAYED
    if call.constrained:
        return Reason.CONSTRAINED
    if call.kind is TraceKind.SIDE and not train_side:
        return Reason.SIDE_CALL
    if call.outcome is CallOutcome.CLIENT_GONE:
        return None if extended else Reason.CLIENT_GONE
    if call.outcome is CallOutcome.COMPLETE and call.finish is Finish.ABORT:
        return Reason.ABORTED
    return None


def build_chains(calls: Iterable[Call]) -> list[Chain]:
    """Group calls into chains: each call joins a chain that it extends exactly, or starts one.

    The chain of the recorded parent is tried first, then the longest chain that the call extends.
    Of two calls that extend the same answer, the first joins the chain and the second starts one.
    """
    ordered = mark_side_calls(check_calls(calls))
    chains = _Chains(ordered)
    for call in ordered:
        chains.add(call)
    return chains.all


def mark_side_calls(calls: Sequence[Call]) -> list[Call]:
    """Return calls with the kind `TraceKind.SIDE` for those that only later calls show to be.

    A call without tools is a side call if no later call continues the conversation that it starts,
    and other calls of the session declare tools: a title, a judge's verdict, a test of the model.
    """
    if not any(call.tools for call in calls):
        return list(calls)
    openings = [call for call in calls if _opens_without_tools(call)]
    parents = {call.parent for call in calls if call.branch is not Branch.NEW_THREAD}
    continued = {
        opening.prompt_ids.tobytes()
        for opening in openings
        if opening.number in parents or any(extends(call, opening) for call in calls)
    }
    side = {call.number for call in openings if call.prompt_ids.tobytes() not in continued}
    return [replace(c, kind=TraceKind.SIDE) if c.number in side else c for c in calls]


def _opens_without_tools(call: Call) -> bool:
    new = call.parent is None or call.branch is Branch.NEW_THREAD
    return new and call.kind is TraceKind.MAIN and not call.tools and not call.raw_prompt


class _Chains:
    """Chains of a session, to which calls are added in the order of their numbers."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.all: list[Chain] = []
        self._continued = {
            call.parent
            for call in calls
            if call.branch is None and call.kind not in {TraceKind.SIDE, TraceKind.COMPACTION}
        }
        """Numbers of the calls that another than a request for a summary extends."""
        self._chain_of: dict[int, Chain] = {}
        self._by_number: dict[int, Call] = {}
        self._first_with_prompt: dict[bytes, int] = {}
        self._latest_of_thread: dict[str | None, int] = {}
        self._images: dict[int, tuple[str, ...]] = {}
        self._repeats = count_repeats(calls)

    def add(self, call: Call) -> None:
        self._images[call.number] = images = self._collect_images(call)
        if call.mode is Mode.TEXT:
            return
        chain = self._find_extended(call, images)
        if chain is None:
            chain = Chain(*self._classify(call))
            self.all.append(chain)
        chain.add(call, images, self._repeats[call.number])
        self._chain_of[call.number] = chain
        self._by_number[call.number] = call
        if call.kind is not TraceKind.SIDE:
            self._latest_of_thread[call.thread] = call.number

    def _find_extended(self, call: Call, images: tuple[str, ...]) -> Chain | None:
        summary = call.kind is TraceKind.COMPACTION and call.parent is not None
        if summary and call.parent in self._continued:
            return None  # made beside the conversation, which it must not split
        recorded = None if call.parent is None else self._chain_of.get(call.parent)
        if recorded is not None and recorded.is_extended_by(call, images):
            return recorded
        extended = (chain for chain in self.all if chain.is_extended_by(call, images))
        return max(extended, key=lambda chain: count_ids(chain.calls[-1]), default=None)

    def _classify(self, call: Call) -> tuple[TraceKind, int | None]:
        """Return the kind of the trace that starts with `call`, and the call that it follows.

        The trace follows the recorded parent, or a call with the same prompt. The first call of a
        sub-agent follows the latest call of the thread that started the sub-agent.
        """
        if call.kind is TraceKind.SIDE:
            return TraceKind.SIDE, None
        parent = None if call.parent is None else self._by_number.get(call.parent)
        if parent is not None and parent.kind is TraceKind.SIDE:
            parent = None
        if call.kind is TraceKind.SUBAGENT and (parent is None or parent.thread != call.thread):
            return TraceKind.SUBAGENT, self._find_starter(call)
        summary = call.kind is TraceKind.COMPACTION or call.branch is Branch.COMPACTED
        if parent is not None:
            return TraceKind.COMPACTION if summary else TraceKind.BRANCH, parent.number
        twin = self._first_with_prompt.setdefault(call.prompt_ids.tobytes(), call.number)
        if twin != call.number:
            return TraceKind.BRANCH, twin
        first = not any(chain.kind is TraceKind.MAIN for chain in self.all)
        return (TraceKind.MAIN if first else TraceKind.SIDE), None

    def _find_starter(self, call: Call) -> int | None:
        """Return the latest call of the thread that started this sub-agent; None if unknown."""
        latest = self._latest_of_thread
        if call.parent_thread is not None or (call.thread is not None and None in latest):
            return latest.get(call.parent_thread)
        return max((latest[thread] for thread in latest if thread != call.thread), default=None)

    def _collect_images(self, call: Call) -> tuple[str, ...]:
        """Return the digests of the images in the prompt of `call`, in order."""
        own = tuple(image.digest for message in call.messages for image in message.images)
        before = self._images.get(call.parent, ()) if call.parent is not None else ()
        return before + own if adds_to_parent(call) else own


def count_repeats(calls: Sequence[Call]) -> dict[int, int]:
    """Return how many answers directly before each call's had the same tool calls, by number.

    An answer is directly before another if it is that of the recorded parent. Tool calls are the
    same if their names and the texts of their arguments are. `calls` are in order.
    """
    actions: dict[int, list[tuple[str, str]]] = {}
    repeats: dict[int, int] = {}
    for call in calls:
        made = call.answer.tool_calls if call.answer is not None else ()
        actions[call.number] = own = [(each.name, each.arguments) for each in made]
        parent = None if call.branch is Branch.NEW_THREAD else call.parent
        repeated = bool(own) and parent is not None and actions.get(parent) == own
        repeats[call.number] = repeats[parent] + 1 if repeated and parent is not None else 0
    return repeats


def check_calls(calls: Iterable[Call]) -> list[Call]:
    """Return calls in the order of their numbers. Raises `CaptureError` on an incomplete one."""
    ordered = sorted(calls, key=lambda call: call.number)
    for call, other in pairwise(ordered):
        if call.number == other.number:
            raise CaptureError(f"session {call.session}: call {call.number} is recorded twice")
    for call in ordered:
        for fault in find_call_faults(call):
            raise CaptureError(f"call {call.number} of session {call.session}: {fault}")
    return ordered


def find_call_faults(call: Call) -> Iterator[str]:
    """Yield the faults that make a call unusable for training."""
    if call.mode is Mode.TEXT:
        return
    sampled = len(call.sampled_ids)
    if not len(call.prompt_ids):
        yield "prompt_ids is empty; the engine must report the ids of the prompt"
    if len(call.logprobs) != sampled:
        yield f"{sampled} sampled_ids but {len(call.logprobs)} logprobs"
    ends = [0, *(span.end for span in call.versions)]
    in_order = all(
        end == span.start <= span.end for span, end in zip(call.versions, ends, strict=False)
    )
    if not in_order or ends[-1] != sampled:
        spans = ", ".join(f"{span.start}-{span.end}" for span in call.versions) or "none"
        yield f"versions cover {spans} of {sampled} sampled tokens; they must cover all, in order"
