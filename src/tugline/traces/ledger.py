"""The books of tokens (I2): per call, per trace, per session and per step.

Every figure is counted from the spans of traces, never carried along beside them, so a ledger
cannot say something that its traces do not. A session's ledger is the sum of its calls', a step's
the sum of its sessions'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from tugline.traces.canonical import unplaced
from tugline.types import Call, Ledger, Reason, Span, Trace


def per_call(calls: Iterable[Call], traces: Iterable[Trace]) -> dict[int, Ledger]:
    """What became of the answer of each call, by the call's number; each ledger balances.

    A token that no span covers was cut off as over length, or left out by the canonical rule where
    that made the traces.
    """
    calls, traces = list(calls), list(traces)
    spans: dict[int, list[Span]] = {call.number: [] for call in calls}
    for trace in traces:
        for span in trace.spans:
            spans[span.call].append(span)
    left_out = frozenset[int]() if all(one.exact for one in traces) else unplaced(calls)
    found: dict[int, Ledger] = {}
    for call in calls:
        held = _held(spans[call.number])
        rest = Reason.UNMERGED if call.number in left_out else Reason.OVER_LENGTH
        lost = {
            rest: len(call.sampled_ids) - held.sampled,
            Reason.NO_TOKEN_IDS: call.unreported_tokens,
        }
        found[call.number] = msgspec.structs.replace(
            held,
            sampled=len(call.sampled_ids) + call.unreported_tokens,
            dropped={reason: count for reason, count in lost.items() if count},
        )
    return found


def per_trace(trace: Trace) -> Ledger:
    """The sampled tokens that a trace holds; what was dropped is in none."""
    return _held(trace.spans)


def _held(spans: Iterable[Span]) -> Ledger:
    kept: Counter[Reason | None] = Counter()
    for span in spans:
        kept[span.masked] += span.end - span.start
    masked = {reason: count for reason, count in kept.items() if reason is not None}
    return Ledger(sampled=kept.total(), trained=kept[None], masked=masked)


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
