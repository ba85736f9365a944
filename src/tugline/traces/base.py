"""What all builders share: the contract, the masking rules and exact chains of calls.

A builder is a pure function from recorded calls to traces and a ledger. Builders differ only in
how they cut sequences: each trains the same sampled tokens, each in the same context.

Invariants: a call joins a chain only if all of the chain's ids and images begin its prompt (I1);
every sampled token ends up trained, masked or dropped, with a reason (I2); prompts that are views
of one buffer, as `tugline.recording.file.read` returns them, are not compared again, so the work
is linear in the unique ids (I7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from tugline import plugins
from tugline.errors import CaptureError
from tugline.traces.lineage import adds_to_parent, extends
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Ids,
    Ledger,
    Mode,
    PluginSpec,
    Reason,
    Span,
    Trace,
    TraceKind,
    shared_prefix,
)


class Built(NamedTuple):
    """The traces of a session and its ledger."""

    traces: tuple[Trace, ...]
    ledger: Ledger
    dropped: Mapping[int, Reason] = {}
    """Why tokens of a call are in no trace, by the call's number; `Reason.OVER_LENGTH` for calls
    that are not listed."""


class Builder(ABC):
    """Turns the recorded calls of one session into traces and a balanced ledger."""

    def __init__(
        self,
        *,
        max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        train_side: bool = False,
    ) -> None:
        """Set the options of the built-in builders.

        `max_length` is the longest trace in tokens; of a longer one the exact beginning is kept.
        `train_side` trains the answers of side calls (titles, routers, summaries) like any other.
        """
        self.max_length = max_length
        self.train_side = train_side

    @abstractmethod
    def build(self, calls: Sequence[Call]) -> Built:
        """Build traces of `calls`, which may be in any order. Pure: equal calls, equal traces.

        Raises `CaptureError` on a call that lacks ids, logprobs or versions.
        """


def make_builder(spec: PluginSpec) -> Builder:
    """Make the builder that a task names. Raises `UsageError` for an unknown name or option."""
    builder: Builder = plugins.make(
        "builder", spec.name, plugins.find("builder", spec.name), spec.options
    )
    return builder


# --------------------------------------------------------------------------- exact chains
class Chain:
    """Calls whose prompts each begin with all ids of the call before."""

    def __init__(
        self, first: Call, kind: TraceKind, forked_after: int | None, images: tuple[str, ...]
    ) -> None:
        self.calls = [first]
        self.kind = kind
        self.forked_after = forked_after
        """Number of the call that this chain follows; None for a new conversation."""
        self.images = [images]
        """Digests of the images in each call's prompt, in order."""

    def append(self, call: Call, images: tuple[str, ...]) -> None:
        """Add a call that extends this chain."""
        self.calls.append(call)
        self.images.append(images)

    def is_extended_by(self, call: Call, images: tuple[str, ...]) -> bool:
        """Whether the prompt of `call` begins, id for id, with everything in this chain.

        Side calls extend only side calls, so that a title request in the middle of a conversation
        does not split it.
        """
        tip = self.calls[-1]
        return (
            (call.kind is TraceKind.SIDE) == (tip.kind is TraceKind.SIDE)
            and images[: len(self.images[-1])] == self.images[-1]
            and extends(call, tip)
        )

    @property
    def length(self) -> int:
        """Tokens in the chain."""
        tip = self.calls[-1]
        return len(tip.prompt_ids) + len(tip.sampled_ids)

    def place_answers(self, *, train_side: bool) -> list[Answer]:
        """Return the answers of its calls with their positions in the chain's ids."""
        tip = self.calls[-1]
        return [
            Answer(
                call,
                len(call.prompt_ids),
                mask_reason(call, extended=call is not tip, train_side=train_side),
                images,
            )
            for call, images in zip(self.calls, self.images, strict=True)
        ]


def mask_reason(call: Call, *, extended: bool, train_side: bool) -> Reason | None:
    """Return why an answer is not trained; None if it is.

    An answer whose client disconnected is masked unless a later prompt extends it, which proves
    that the harness received it. An answer whose engine was lost is trained as far as it got, like
    one that was cut for length.
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
    """Sort calls into chains: each call joins the chain that it extends exactly, or starts one.

    The chain of the recorded parent is tried first and verified, then the longest that fits. Of
    two calls that extend the same answer, the first joins the chain and the second starts its own.
    """
    chains = _Chains()
    for call in check_calls(calls):
        chains.add(call)
    return chains.all


class _Chains:
    """The chains of a session while calls are added in the order of their numbers."""

    def __init__(self) -> None:
        self.all: list[Chain] = []
        self._chain_of: dict[int, Chain] = {}
        self._by_number: dict[int, Call] = {}
        self._first_with_prompt: dict[bytes, int] = {}
        self._latest_of_thread: dict[str | None, int] = {}
        self._images: dict[int, tuple[str, ...]] = {}

    def add(self, call: Call) -> None:
        self._images[call.number] = images = self._collect_images(call)
        if call.mode is Mode.TEXT:
            return
        chain = self._find_extended(call, images)
        if chain is None:
            chain = Chain(call, *self._classify(call), images)
            self.all.append(chain)
        else:
            chain.append(call, images)
        self._chain_of[call.number] = chain
        self._by_number[call.number] = call
        if call.kind is not TraceKind.SIDE:
            self._latest_of_thread[call.thread] = call.number

    def _find_extended(self, call: Call, images: tuple[str, ...]) -> Chain | None:
        recorded = None if call.parent is None else self._chain_of.get(call.parent)
        if recorded is not None and recorded.is_extended_by(call, images):
            return recorded
        extended = (chain for chain in self.all if chain.is_extended_by(call, images))
        return max(extended, key=lambda chain: chain.length, default=None)

    def _classify(self, call: Call) -> tuple[TraceKind, int | None]:
        """Return the kind of trace that begins with `call`, and the call that it follows.

        The trace follows the recorded parent, or a call with the same prompt. The first call of a
        sub-agent is no fork: it follows the latest call of the thread that started it.
        """
        if call.kind is TraceKind.SIDE:
            return TraceKind.SIDE, None
        parent = None if call.parent is None else self._by_number.get(call.parent)
        if call.kind is TraceKind.SUBAGENT and (parent is None or parent.thread != call.thread):
            return TraceKind.SUBAGENT, self._find_starter(call)
        if parent is not None and call.branch is Branch.COMPACTED:
            return TraceKind.COMPACTION, parent.number
        if parent is not None:
            return TraceKind.BRANCH, parent.number
        twin = self._first_with_prompt.setdefault(call.prompt_ids.tobytes(), call.number)
        if twin != call.number:
            return TraceKind.BRANCH, twin
        first = not any(chain.kind is TraceKind.MAIN for chain in self.all)
        return (TraceKind.MAIN if first else TraceKind.SIDE), None

    def _find_starter(self, call: Call) -> int | None:
        """Return the latest call of the thread that started this sub-agent; None if unknown."""
        if call.parent_thread is not None:
            return self._latest_of_thread.get(call.parent_thread)
        latest = self._latest_of_thread.items()
        return max((number for thread, number in latest if thread != call.thread), default=None)

    def _collect_images(self, call: Call) -> tuple[str, ...]:
        """Return the digests of the images in the prompt of `call`, in order."""
        own = tuple(image.digest for message in call.messages for image in message.images)
        before = self._images.get(call.parent, ()) if call.parent is not None else ()
        return before + own if adds_to_parent(call) else own


def check_calls(calls: Iterable[Call]) -> list[Call]:
    """Return calls in the order of their numbers. Raises `CaptureError` on an incomplete one."""
    ordered = sorted(calls, key=lambda call: call.number)
    for one, other in pairwise(ordered):
        if one.number == other.number:
            msg = f"session {one.session}: call {one.number} is there twice"
            raise CaptureError(msg)
    for call in ordered:
        if call.mode is Mode.TEXT:
            continue
        where, sampled = f"call {call.number} of session {call.session}", len(call.sampled_ids)
        if not len(call.prompt_ids):
            msg = f"{where}: prompt_ids is empty; the engine must report the ids of its prompt"
            raise CaptureError(msg)
        if len(call.logprobs) != sampled:
            msg = f"{where}: {sampled} sampled_ids but {len(call.logprobs)} logprobs"
            raise CaptureError(msg)
        if not versions_cover(call):
            msg = f"{where}: versions {call.versions} must cover its {sampled} tokens in order"
            raise CaptureError(msg)
    return ordered


def versions_cover(call: Call) -> bool:
    """Whether the version spans of `call` cover its sampled tokens in order, without a gap."""
    end = 0
    for span in call.versions:
        if span.start != end or span.end < span.start:
            return False
        end = span.end
    return end == len(call.sampled_ids)


# --------------------------------------------------------------------------- a trace
class Answer(NamedTuple):
    """A call's answer at its position in a trace."""

    call: Call
    start: int
    """Index in the trace of its first token."""
    masked: Reason | None
    """Why it is not trained; None if it is."""
    images: tuple[str, ...]
    """Digests of the images before it, in order."""


class TraceMeta(NamedTuple):
    """The fields of a trace that are not tokens."""

    kind: TraceKind
    parent: int | None
    exact: bool = True


def make_trace(
    ids: Ids,
    answers: Sequence[Answer],
    meta: TraceMeta,
    max_length: int | None,
    earlier: Sequence[Trace],
) -> Trace:
    """Make one trace of `ids` with `answers` as its spans; `earlier` are the traces so far.

    All other ids are context: mask False, logprob 0, no span. Of more than `max_length` tokens the
    beginning is kept, up to the last answer that begins in it.
    """
    if max_length is not None:
        answers = [one for one in answers if one.start < max_length] or answers[:1]
        ids = ids[: min(max_length, answers[-1].start + len(answers[-1].call.sampled_ids))]
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    spans: list[Span] = []
    for call, start, masked, _ in answers:
        room = max(0, len(ids) - start)
        logprobs[start : start + len(call.logprobs)] = call.logprobs[:room]
        mask[start : start + len(call.sampled_ids)] = masked is None
        spans += [
            Span(call.number, start + v.start, min(start + v.end, len(ids)), v.version, masked)
            for v in call.versions
            if v.start < min(v.end, room)
        ]
    last = answers[-1]
    trace = Trace(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        spans=tuple(spans),
        kind=meta.kind,
        parent=meta.parent,
        thread=answers[0].call.thread,
        thinking_retention=last.call.thinking_retention,
        exact=meta.exact,
        images=last.images,
    )
    if meta.parent is None:
        return trace
    return msgspec.structs.replace(trace, shared=count_shared_tokens(earlier[meta.parent], trace))


def count_shared_tokens(a: Trace, b: Trace) -> int:
    """Return how many leading tokens two traces have in common.

    An id does not say which image it stands for, so traces with different images share none.
    """
    n = min(len(a.images), len(b.images))
    return shared_prefix(a.ids, b.ids) if a.images[:n] == b.images[:n] else 0
