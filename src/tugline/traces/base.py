"""What every builder shares: the contract, the masking rules and the exact chains of calls.

A builder is a pure function from recorded calls to traces and a ledger. The rules live here so
that two builders can differ in how they cut sequences, and in nothing else: whatever builder is
chosen, the same sampled tokens are trained, each in the same context.

Invariants: a call joins a chain only when the chain's ids and pictures, all of them, begin its
prompt (I1); every sampled token ends up trained, masked or dropped, with a reason (I2); prompts
that are views of one buffer, as a recording's reader hands them out, are not compared again, so the
work is linear in the ids that there are (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np

from tugline.errors import CaptureError, ConfigError
from tugline.types import (
    Branch,
    Call,
    CallOutcome,
    Finish,
    Ids,
    Ledger,
    Mode,
    Reason,
    Span,
    Trace,
    TraceKind,
    shared_prefix,
)


class Built(NamedTuple):
    """What a builder makes of a session."""

    traces: tuple[Trace, ...]
    ledger: Ledger


class Builder(Protocol):
    """Recorded calls of one session, in any order, to traces and a balanced ledger."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Pure: equal calls give equal traces. Raises `CaptureError` on a call that lacks ids."""
        ...


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the built-in builders can be told."""

    max_length: int | None = None
    """Longest trace in tokens; of a longer one the exact beginning is kept. None: no limit."""
    train_side: bool = False
    """Train the answers of side calls (titles, routers, summaries) like any other."""

    @classmethod
    def read(cls, builder: str, options: dict[str, object]) -> Self:
        """Check options given by keyword. Raises `ConfigError` naming the one that is wrong."""
        unknown = sorted(set(options) - set(cls.__struct_fields__))
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            msg = f"builder {builder!r} has no option {unknown[0]!r} (known: {known})"
            raise ConfigError(msg)
        for name, value in options.items():
            right = cls.wanted(name, value)
            if right:
                msg = f"builder {builder!r}: {name} is {value!r}, must be {right}"
                raise ConfigError(msg)
        return msgspec.convert(options, cls)

    @classmethod
    def wanted(cls, name: str, value: object) -> str:
        """What an option must be, if `value` is not that; else an empty text."""
        if name == "max_length":
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            return "" if whole or value is None else "a whole number from 1"
        return "" if isinstance(value, bool) else "true or false"


# --------------------------------------------------------------------------- exact chains
class Chain:
    """Calls of which each one's prompt begins with all ids of the one before it."""

    def __init__(
        self, first: Call, kind: TraceKind, after: int | None, images: tuple[str, ...]
    ) -> None:
        self.calls = [first]
        self.kind = kind
        self.after = after
        """Number of the call that this chain forked after; None where it starts afresh."""
        self.images = [images]
        """Digests of the pictures in each call's prompt, in order."""

    def add(self, call: Call, images: tuple[str, ...]) -> None:
        """Go on with a call that carries this chain on."""
        self.calls.append(call)
        self.images.append(images)

    def carried_on_by(self, call: Call, images: tuple[str, ...]) -> bool:
        """Whether the prompt of `call` starts, id for id, with everything in this chain.

        A call beside the task carries on no work and no work carries it on, so a question aside
        does not break a conversation in two.
        """
        tip = self.calls[-1]
        asked = len(tip.prompt_ids)
        end = asked + len(tip.sampled_ids)
        if len(call.prompt_ids) < end or call.prompt_ids[end - 1] != self.last_id:
            return False
        return (
            (call.kind is TraceKind.SIDE) == (tip.kind is TraceKind.SIDE)
            and images[: len(self.images[-1])] == self.images[-1]
            and np.array_equal(call.prompt_ids[asked:end], tip.sampled_ids)
            and shared_prefix(call.prompt_ids, tip.prompt_ids) == asked
        )

    @property
    def last_id(self) -> int:
        """The id at the end of the chain."""
        tip = self.calls[-1]
        return int(tip.sampled_ids[-1] if len(tip.sampled_ids) else tip.prompt_ids[-1])

    @property
    def length(self) -> int:
        """Tokens in the chain."""
        tip = self.calls[-1]
        return len(tip.prompt_ids) + len(tip.sampled_ids)

    def answers(self, options: Options) -> list[Answer]:
        """Its calls' answers, each where the exact ids have it."""
        tip, side = self.calls[-1], options.train_side
        return [
            Answer(call, len(call.prompt_ids), untrained(call, call is not tip, side), images)
            for call, images in zip(self.calls, self.images, strict=True)
        ]


def untrained(call: Call, carried_on: bool, train_side: bool) -> Reason | None:  # noqa: FBT001
    """Why an answer is not trained; None when it is.

    An answer whose client went away is masked, unless a later prompt carries it on token for
    token: then the harness had it after all. One whose engine was lost is trained as far as it
    got, like any answer that was cut for length.
    """
    if call.replayed:
        return Reason.REPLAYED
    if call.constrained:
        return Reason.CONSTRAINED
    if call.kind is TraceKind.SIDE and not train_side:
        return Reason.SIDE_CALL
    if call.outcome is CallOutcome.CLIENT_GONE:
        return None if carried_on else Reason.CLIENT_GONE
    if call.outcome is CallOutcome.COMPLETE and call.finish is Finish.ABORT:
        return Reason.ABORTED
    return None


def chains(calls: Iterable[Call]) -> list[Chain]:
    """Sort calls into chains: each call carries on the chain it extends exactly, or starts one.

    The call's recorded parent is tried first and verified; failing that, the longest chain that
    fits. A second call that carries on from the same place finds the chain gone on without it
    and starts its own.
    """
    sorting = _Sorting()
    for call in checked(calls):
        sorting.place(call)
    return sorting.found


class _Sorting:
    """Chains while calls are sorted into them, in the order of their numbers."""

    def __init__(self) -> None:
        self.found: list[Chain] = []
        self._owner: dict[int, Chain] = {}
        self._by_number: dict[int, Call] = {}
        self._afresh: dict[bytes, int] = {}
        """The call that first asked something new, by its prompt."""
        self._latest: dict[str | None, int] = {}
        """The last call of each thread that is not beside the task."""
        self._images: dict[int, tuple[str, ...]] = {}

    def place(self, call: Call) -> None:
        self._images[call.number] = images = self._pictures(call)
        if call.mode is Mode.TEXT:
            return
        chain = self._fitting(call, images)
        if chain is None:
            chain = Chain(call, *self._standing(call), images)
            self.found.append(chain)
        else:
            chain.add(call, images)
        self._owner[call.number] = chain
        self._by_number[call.number] = call
        if call.kind is not TraceKind.SIDE:
            self._latest[call.thread] = call.number

    def _fitting(self, call: Call, images: tuple[str, ...]) -> Chain | None:
        recorded = None if call.parent is None else self._owner.get(call.parent)
        if recorded is not None and recorded.carried_on_by(call, images):
            return recorded
        fitting = (chain for chain in self.found if chain.carried_on_by(call, images))
        return max(fitting, key=lambda chain: chain.length, default=None)

    def _standing(self, call: Call) -> tuple[TraceKind, int | None]:
        """What kind of trace begins with `call`, and the call that it comes after.

        That is a fork after the recorded parent, or beside what began with the same prompt.
        Another agent's first call forks nothing: it was started by its parent's thread.
        """
        if call.kind is TraceKind.SIDE:
            return TraceKind.SIDE, None
        parent = None if call.parent is None else self._by_number.get(call.parent)
        if call.kind is TraceKind.SUBAGENT and (parent is None or parent.thread != call.thread):
            return TraceKind.SUBAGENT, self._started_by(call)
        if parent is not None and call.branch is Branch.COMPACTED:
            return TraceKind.COMPACTION, parent.number
        if parent is not None:
            return TraceKind.BRANCH, parent.number
        twin = self._afresh.setdefault(call.prompt_ids.tobytes(), call.number)
        if twin != call.number:
            return TraceKind.BRANCH, twin
        first = not any(chain.kind is TraceKind.MAIN for chain in self.found)
        return (TraceKind.MAIN if first else TraceKind.SIDE), None

    def _started_by(self, call: Call) -> int | None:
        """The last call so far of the thread that `call` names as its parent's; None if unknown."""
        if call.parent_thread is not None:
            return self._latest.get(call.parent_thread)
        others = (number for thread, number in self._latest.items() if thread != call.thread)
        return max(others, default=None)

    def _pictures(self, call: Call) -> tuple[str, ...]:
        """Digests of the pictures in the prompt of `call`, in order.

        Its messages are what it added to its parent's conversation, or all of them on a branch;
        one that only the engine rendered anew is no branch of the conversation.
        """
        own = tuple(image.digest for message in call.messages for image in message.images)
        before = () if call.parent is None else self._images.get(call.parent, ())
        added = call.branch in {None, Branch.ENGINE_RERENDERED}
        return before + own if added else own


def checked(calls: Iterable[Call]) -> list[Call]:
    """Calls in the order of their numbers. Raises `CaptureError` on one that lacks something."""
    ordered = sorted(calls, key=lambda call: call.number)
    for one, other in pairwise(ordered):
        if one.number == other.number:
            msg = f"session {one.session}: call {one.number} is there twice"
            raise CaptureError(msg)
    for call in ordered:
        if call.mode is not Mode.TEXT:
            _check(call)
    return ordered


def _check(call: Call) -> None:
    where = f"call {call.number} of session {call.session}"
    sampled = len(call.sampled_ids)
    if not len(call.prompt_ids):
        msg = f"{where}: prompt_ids is empty; the engine must report the ids of its prompt"
        raise CaptureError(msg)
    if len(call.logprobs) != sampled:
        msg = f"{where}: {sampled} sampled_ids but {len(call.logprobs)} logprobs"
        raise CaptureError(msg)
    bounds = [(0, 0), *((span.start, span.end) for span in call.versions), (sampled, sampled)]
    if any(end > end_next or end != start for (_, end), (start, end_next) in pairwise(bounds)):
        msg = f"{where}: versions {call.versions} must cover its {sampled} sampled tokens in order"
        raise CaptureError(msg)


# --------------------------------------------------------------------------- a trace
class Answer(NamedTuple):
    """A call's answer at its place in a trace."""

    call: Call
    start: int
    """Index in the trace of its first token."""
    masked: Reason | None
    """Why it is not trained; None if it is."""
    images: tuple[str, ...]
    """Digests of the pictures before it, in order."""


class TraceMeta(NamedTuple):
    """What is written about a trace, beside its tokens."""

    kind: TraceKind
    parent: int | None
    exact: bool = True


def trace(
    ids: Ids, answers: Sequence[Answer], line: TraceMeta, limit: int | None, before: Sequence[Trace]
) -> Trace:
    """One trace of `ids`, with `answers` as its spans; `before` are the traces made so far.

    Whatever else the ids hold is context: mask False, logprob 0, no span. Of more than `limit`
    tokens the beginning is kept, up to the last answer that begins there.
    """
    if limit is not None:
        answers = [one for one in answers if one.start < limit] or answers[:1]
        ids = ids[: min(limit, answers[-1].start + len(answers[-1].call.sampled_ids))]
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
    made = Trace(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        spans=tuple(spans),
        kind=line.kind,
        parent=line.parent,
        thread=answers[0].call.thread,
        thinking_retention=last.call.thinking_retention,
        exact=line.exact,
        images=last.images,
    )
    if line.parent is None:
        return made
    return msgspec.structs.replace(made, shared=shared(before[line.parent], made))


def shared(a: Trace, b: Trace) -> int:
    """How many leading tokens two traces have in common, pictures included.

    An id does not tell which picture it stands for: pictures that differ leave nothing to share.
    """
    n = min(len(a.images), len(b.images))
    return shared_prefix(a.ids, b.ids) if a.images[:n] == b.images[:n] else 0
