"""The books of tokens (I2): per call, per trace, per session and per step.

Every figure is counted from the spans of traces, never carried along beside them, so a ledger
cannot say something that its traces do not. A session's ledger is the sum of its calls', a step's
the sum of its sessions'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tugline.builders.canonical import unplaced
from tugline.types import Call, Ledger, Reason, Trace


def per_call(calls: Iterable[Call], traces: Iterable[Trace]) -> dict[int, Ledger]:
    """What became of the answer of each call, by the call's number; each ledger balances.

    A token that no span covers was cut off as over length, or left out by the canonical rule where
    that made the traces.
    """
    calls, traces = list(calls), list(traces)
    kept: dict[int, Counter[Reason | None]] = {call.number: Counter() for call in calls}
    for trace in traces:
        for span in trace.spans:
            kept[span.call][span.masked] += span.end - span.start
    left_out = frozenset[int]() if all(one.exact for one in traces) else unplaced(calls)
    return {call.number: _of(call, kept[call.number], call.number in left_out) for call in calls}


def _of(call: Call, kept: Counter[Reason | None], left_out: bool) -> Ledger:  # noqa: FBT001
    sampled = len(call.sampled_ids)
    rest = Reason.UNMERGED if left_out else Reason.OVER_LENGTH
    dropped = {rest: sampled - kept.total(), Reason.NO_TOKEN_IDS: call.unseen}
    return Ledger(
        sampled=sampled + call.unseen,
        trained=kept[None],
        masked={reason: count for reason, count in kept.items() if reason is not None},
        dropped={reason: count for reason, count in dropped.items() if count},
    )


def per_trace(trace: Trace) -> Ledger:
    """The sampled tokens that a trace holds; what was dropped is in none."""
    kept: Counter[Reason | None] = Counter()
    for span in trace.spans:
        kept[span.masked] += span.end - span.start
    return Ledger(
        sampled=kept.total(),
        trained=kept[None],
        masked={reason: count for reason, count in kept.items() if reason is not None},
    )


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The sum of ledgers; it balances if each of them does."""
    sampled = trained = 0
    masked: Counter[Reason] = Counter()
    dropped: Counter[Reason] = Counter()
    for one in ledgers:
        sampled, trained = sampled + one.sampled, trained + one.trained
        masked.update(one.masked)
        dropped.update(one.dropped)
    return Ledger(sampled=sampled, trained=trained, masked=dict(masked), dropped=dict(dropped))


def balance(calls: Sequence[Call], traces: Iterable[Trace]) -> Ledger:
    """Account for every token that was sampled in a session."""
    return total(per_call(calls, traces).values())
