"""Token accounting (I2): per call, per trace, per session and per step.

All counts come from the spans of traces, so a ledger cannot disagree with its traces. The ledger
of a session is the sum of its calls', that of a step the sum of its sessions'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tugline.types import Call, Ledger, Reason, Span, Trace

_NOTHING: Mapping[int, Reason] = {}


def count_calls(
    calls: Sequence[Call], traces: Iterable[Trace], dropped: Mapping[int, Reason] = _NOTHING
) -> dict[int, Ledger]:
    """Account for the answer of each call, by the call's number; each ledger balances.

    Tokens that no span covers were dropped for the reason in `dropped` (`Built.dropped`), by
    default for exceeding the maximum length.
    """
    spans: dict[int, list[Span]] = {call.number: [] for call in calls}
    for trace in traces:
        for span in trace.spans:
            spans[span.call].append(span)
    ledgers: dict[int, Ledger] = {}
    for call in calls:
        counted = _count_spans(spans[call.number])
        reason = dropped.get(call.number, Reason.OVER_LENGTH)
        lost = {
            reason: len(call.sampled_ids) - counted.sampled,
            Reason.NO_TOKEN_IDS: call.unreported_tokens,
        }
        ledgers[call.number] = msgspec.structs.replace(
            counted,
            sampled=len(call.sampled_ids) + call.unreported_tokens,
            dropped={reason: count for reason, count in lost.items() if count},
        )
    return ledgers


def count_trace(trace: Trace) -> Ledger:
    """Account for the sampled tokens of a trace; dropped tokens are in no trace."""
    return _count_spans(trace.spans)


def _count_spans(spans: Iterable[Span]) -> Ledger:
    counts: Counter[Reason | None] = Counter()
    for span in spans:
        counts[span.masked] += span.end - span.start
    masked = {reason: count for reason, count in counts.items() if reason is not None}
    return Ledger(sampled=counts.total(), trained=counts[None], masked=masked)


def sum_ledgers(ledgers: Iterable[Ledger]) -> Ledger:
    """Add up ledgers; the sum balances if each of them does."""
    sampled = trained = 0
    masked: Counter[Reason] = Counter()
    dropped: Counter[Reason] = Counter()
    for one in ledgers:
        sampled, trained = sampled + one.sampled, trained + one.trained
        masked.update(one.masked)
        dropped.update(one.dropped)
    return Ledger(sampled=sampled, trained=trained, masked=dict(masked), dropped=dict(dropped))


def count_session(
    calls: Sequence[Call], traces: Iterable[Trace], dropped: Mapping[int, Reason] = _NOTHING
) -> Ledger:
    """Account for every token that was sampled in a session."""
    return sum_ledgers(count_calls(calls, traces, dropped).values())
