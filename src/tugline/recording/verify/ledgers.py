"""Whether what is trained is what was sampled (I1, I2): the session's builder is run once more.

Its ledger must balance and be the one that was recorded, and every span of an exact trace must
hold the very ids, in the very context, that the engine sampled. A trace that says of itself that
it is not exact is not held to that.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import numpy as np

from tugline.errors import CaptureError, ConfigError, UsageError
from tugline.plugins import find
from tugline.recording.file import Recording
from tugline.recording.verify.findings import Check, Verdict, settled
from tugline.traces.base import Builder
from tugline.types import Call, Ledger, PluginSpec, Span, Trace


def builder_of(part: PluginSpec) -> Builder:
    """The builder that a task names. Raises `UsageError` naming what is wrong."""
    target = find("builder", part.name)
    try:
        made: Builder = target(**part.options)
    except TypeError as error:
        known = ", ".join(inspect.signature(target).parameters) or "none"
        msg = f"builder {part.name!r}: {error} (its options: {known})"
        raise ConfigError(msg) from error
    return made


def ledger_checks(recording: Recording) -> dict[str, Check]:
    """The checks ``ledger`` and ``traces``."""
    try:
        part = recording.header.task.builder if recording.header else PluginSpec("prefix_merging")
        traces, ledger = builder_of(part).build(recording.calls)
    except UsageError as error:
        unknown = Check(Verdict.UNCHECKED, str(error))
        return {"ledger": unknown, "traces": unknown}
    except CaptureError as error:
        wrong = Check(Verdict.FAIL, str(error))
        return {"ledger": wrong, "traces": wrong}
    told = f"{ledger.sampled} sampled = {ledger.trained} trained"
    told += "".join(f" + {count} {reason}" for reason, count in _reasons(ledger))
    known = {call.number: call for call in recording.calls}
    faults = [fault for number, one in enumerate(traces) for fault in _wrong(number, one, known)]
    trained = sum(int(one.mask.sum()) for one in traces)
    if trained != ledger.trained:
        faults.append(f"the traces train {trained} tokens, the ledger {ledger.trained}")
    inexact = sum(not one.exact for one in traces)
    count = f"{len(traces)}" + (f", {inexact} of them inexact" if inexact else "")
    return {
        "ledger": settled(_unbalanced(recording, ledger), told),
        "traces": settled(faults, count),
    }


def _reasons(ledger: Ledger) -> Sequence[tuple[str, int]]:
    return [*ledger.masked.items(), *ledger.dropped.items()]


def _unbalanced(recording: Recording, ledger: Ledger) -> list[str]:
    faults = []
    if not ledger.balanced:
        faults.append(f"the ledger does not balance: {ledger}")
    sampled = sum(len(call.sampled_ids) + call.unreported_tokens for call in recording.calls)
    if ledger.sampled != sampled:
        faults.append(f"{sampled} tokens were sampled, the ledger has {ledger.sampled}")
    result = recording.result
    never_built = result is not None and result.failure is not None and not result.ledger.sampled
    if result is not None and not never_built and result.ledger != ledger:
        faults.append(f"the recorded ledger is another: {result.ledger}, not {ledger}")
    return faults


def _wrong(number: int, trace: Trace, known: Mapping[int, Call]) -> list[str]:
    """One line for each span of an exact trace that is not what was sampled."""
    if not trace.exact:
        return []
    return [
        f"trace {number} does not hold what call {span.call} sampled at {span.start}-{span.end}"
        for span in trace.spans
        if span.call not in known or not _is_as_sampled(trace, span, known[span.call])
    ]


def _is_as_sampled(trace: Trace, span: Span, call: Call) -> bool:
    asked, place = len(call.prompt_ids), slice(span.start, span.end)
    said = slice(span.start - asked, span.end - asked)
    return (
        span.start >= asked
        and np.array_equal(trace.ids[:asked], call.prompt_ids)
        and np.array_equal(trace.ids[asked : span.end], call.sampled_ids[: said.stop])
        and np.array_equal(trace.logprobs[place], call.logprobs[said])
        and bool((trace.mask[place] == (span.masked is None)).all())
    )
