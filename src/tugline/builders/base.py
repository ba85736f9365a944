"""What every builder shares: the contract, the masking rules and the exact chains of calls.

A builder is a pure function from recorded calls to traces and a ledger. The rules live here so
that two builders can differ in how they cut sequences, and in nothing else: whatever builder is
chosen, the same sampled tokens are trained, each in the same context.

Invariants: a call joins a chain only when the chain's ids, all of them, begin its prompt (I1);
every sampled token ends up trained, masked or dropped, with a reason (I2); the work is one numpy
comparison per call, so its cost is linear in the ids that were recorded (I7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from tugline.errors import CaptureError, ConfigError
from tugline.types import (
    Branch,
    Call,
    Finish,
    Ids,
    Ledger,
    Mode,
    Outcome,
    Reason,
    Span,
    Trace,
    TraceKind,
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

    @classmethod
    def read(cls, builder: str, options: dict[str, object]) -> Options:
        """Check options given by keyword. Raises `ConfigError` naming the one that is wrong."""
        unknown = sorted(set(options) - set(cls.__struct_fields__))
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            msg = f"builder {builder!r} has no option {unknown[0]!r} (known: {known})"
            raise ConfigError(msg)
        length = options.get("max_length")
        if length is None:
            return cls()
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            msg = f"builder {builder!r}: max_length is {length!r}, must be a whole number from 1"
            raise ConfigError(msg)
        return cls(max_length=length)


class Chain:
    """Calls of which each one's prompt begins with all ids of the one before it."""

    def __init__(self, first: Call, kind: TraceKind, after: int | None) -> None:
        self.calls = [first]
        self.kind = kind
        self.after = after
        """Number of the call that this chain forked after; None where it starts afresh."""

    def carried_on_by(self, call: Call) -> bool:
        """Whether the prompt of `call` starts, id for id, with everything in this chain."""
        tip = self.calls[-1]
        asked = len(tip.prompt_ids)
        end = asked + len(tip.sampled_ids)
        if len(call.prompt_ids) < end or call.prompt_ids[end - 1] != self.last_id:
            return False
        return np.array_equal(call.prompt_ids[asked:end], tip.sampled_ids) and np.array_equal(
            call.prompt_ids[:asked], tip.prompt_ids
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

    def reason(self, call: Call) -> Reason | None:
        """Why the answer of `call`, a member of this chain, is not trained; None when it is.

        An answer whose client went away is masked, unless a later prompt carries it on token for
        token: then the harness had it after all. One whose engine was lost is trained as far as it
        got, like any answer that was cut for length.
        """
        if call.replayed:
            return Reason.REPLAYED
        if call.kind is TraceKind.SIDE:
            return Reason.SIDE_CALL
        if call.outcome is Outcome.CLIENT_GONE:
            return Reason.CLIENT_GONE if call is self.calls[-1] else None
        if call.outcome is Outcome.COMPLETE and call.finish is Finish.ABORT:
            return Reason.ABORTED
        return None


def chains(calls: Iterable[Call]) -> list[Chain]:
    """Sort calls into chains: each call carries on the chain it extends exactly, or starts one.

    The call's recorded parent is tried first and verified; failing that, the longest chain that
    fits. A second call that carries on from the same place finds the chain gone on without it
    and starts its own.
    """
    found: list[Chain] = []
    owner: dict[int, Chain] = {}
    afresh: dict[bytes, int] = {}
    for call in sorted(calls, key=lambda call: call.number):
        if call.mode is Mode.TEXT:
            continue  # there is nothing to make a trace of; `balance` counts what was sampled
        _check(call)
        chain = _chain_for(call, found, owner)
        if chain is None:
            chain = _new_chain(call, first=not found, owner=owner, afresh=afresh)
            found.append(chain)
        else:
            chain.calls.append(call)
        owner[call.number] = chain
    return found


def _chain_for(call: Call, found: list[Chain], owner: dict[int, Chain]) -> Chain | None:
    if call.parent in owner and owner[call.parent].carried_on_by(call):
        return owner[call.parent]
    fitting = (chain for chain in found if chain.carried_on_by(call))
    return max(fitting, key=lambda chain: chain.length, default=None)


def _new_chain(
    call: Call, *, first: bool, owner: dict[int, Chain], afresh: dict[bytes, int]
) -> Chain:
    """A fork after the recorded parent, or beside a chain that began with the same prompt.

    Another agent's first call forks nothing: it was started by its parent's thread.
    """
    if call.kind is TraceKind.SIDE:
        return Chain(call, TraceKind.SIDE, None)
    own = call.parent in owner and owner[call.parent].calls[0].thread == call.thread
    if call.kind is TraceKind.SUBAGENT and not own:
        return Chain(call, TraceKind.SUBAGENT, _started_by(call, owner))
    if call.branch is Branch.COMPACTED and call.parent in owner:
        return Chain(call, TraceKind.COMPACTION, call.parent)
    if call.parent in owner:
        return Chain(call, TraceKind.BRANCH, call.parent)
    twin = afresh.setdefault(call.prompt_ids.tobytes(), call.number)
    if twin != call.number:
        return Chain(call, TraceKind.BRANCH, twin)
    return Chain(call, TraceKind.MAIN if first else TraceKind.SIDE, None)


def _started_by(call: Call, owner: dict[int, Chain]) -> int | None:
    """The last call before `call` of the thread that it names as its parent; None if unknown."""
    before = [
        one.number
        for chain in owner.values()
        for one in chain.calls
        if one.number < call.number
        and one.thread != call.thread
        and (call.parent_thread is None or one.thread == call.parent_thread)
        and one.kind is not TraceKind.SIDE
    ]
    return max(before, default=None)


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


def trace(chain: Chain, calls: Sequence[Call], *, parent: int | None, limit: int | None) -> Trace:
    """One trace that ends with the last of `calls`, with the answers of `calls` as its spans.

    `calls` belong to `chain` and each carries on the one before. Whatever else the last prompt
    holds is context: mask False, logprob 0, no span. The first `limit` tokens are kept.
    """
    last = calls[-1]
    ids: Ids = np.concatenate([last.prompt_ids, last.sampled_ids])[:limit]
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    spans: list[Span] = []
    for call in calls:
        start, reason = len(call.prompt_ids), chain.reason(call)
        room = max(0, len(ids) - start)
        logprobs[start : start + len(call.logprobs)] = call.logprobs[:room]
        mask[start : start + len(call.sampled_ids)] = reason is None
        spans += [
            Span(call.number, start + v.start, min(start + v.end, len(ids)), v.version, reason)
            for v in call.versions
            if v.start < min(v.end, room)
        ]
    return Trace(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        spans=tuple(spans),
        kind=chain.kind,
        parent=parent,
        thread=chain.calls[0].thread,
        thinking_retention=last.thinking_retention,
    )


def balance(calls: Sequence[Call], traces: Iterable[Trace]) -> Ledger:
    """Account for every sampled token: what no span covers was cut off as over length."""
    unseen = sum(call.unseen for call in calls)
    sampled = sum(len(call.sampled_ids) for call in calls)
    kept: Counter[Reason | None] = Counter()
    for one in traces:
        for span in one.spans:
            kept[span.masked] += span.end - span.start
    cut = sampled - kept.total()
    trained = kept.pop(None, 0)
    masked = {reason: count for reason, count in kept.items() if reason is not None}
    dropped = {Reason.OVER_LENGTH: cut} if cut else {}
    if unseen:
        dropped[Reason.NO_TOKEN_IDS] = unseen
    return Ledger(sampled=sampled + unseen, trained=trained, masked=masked, dropped=dropped)
