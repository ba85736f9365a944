"""Checks of a recorded session, from its recording alone or with an engine.

- ``lineage``: every prompt continues its recorded parent, id for id (I1)
- ``text``: the ids decode to the answer that the harness received
- ``numbers``: logprobs are finite and at most 0, versions cover every sampled token, experts and
  kept sets are possible ones
- ``ledger``, ``traces``: the session's builder, run again, gives the recorded ledger, and its exact
  traces contain the sampled tokens in the context, and with the experts and kept sets, with which
  they were sampled (I1, I2)
- ``engine``, ``model``: captured logprobs equal those that an engine, or a model's own forward pass
  with the recorded experts and kept sets, recomputes

`VerifyVerdict.UNCHECKED` marks a check that could not be made, with a reason; it is never a pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from tugline.errors import CaptureError, ConfigError, TuglineError, UsageError
from tugline.recording.experts import check_experts
from tugline.recording.file import Recording
from tugline.recording.verify.engine import Scorer, recompute_logprobs, why_not_comparable
from tugline.recording.verify.text import TextVerifier
from tugline.traces.base import make_builder
from tugline.traces.lineage import Continuation, find_call_faults, trace_lineage
from tugline.types import Call, Ledger, Logprobs, PluginSpec, Span, Trace


class VerifyVerdict(StrEnum):
    """Verdict of a check."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNCHECKED = "unchecked"


class VerifyCheck(msgspec.Struct, frozen=True):
    """A check of one property of a session."""

    verdict: VerifyVerdict
    detail: str = ""


class CallReport(msgspec.Struct, kw_only=True):
    """Report of a call. Logprob figures are in nats; None if the engine did not score it."""

    call: int
    continuation: Continuation
    detail: str = ""
    """Reasons for the continuation."""
    prompt: int
    """Number of ids in the prompt."""
    shared: int
    """Number of leading prompt ids shared with the parent."""
    sampled: int
    faults: list[str] = []
    """Faults, one line each."""
    scored: int = 0
    """Number of sampled tokens whose log probability was recomputed."""
    max_dlogprob: float | None = None
    """Largest absolute difference of a captured and a recomputed log probability."""
    mean_dlogprob: float | None = None
    """Mean of the absolute differences."""
    kl: float | None = None
    """Mean of ``exp(-d) - 1 + d`` for the differences `d`: an unbiased estimate, never negative."""
    own_experts_max_dlogprob: float | None = None
    """`max_dlogprob` if the model's routers choose the experts; None without recorded experts."""
    own_experts_mean_dlogprob: float | None = None


class SessionReport(msgspec.Struct, kw_only=True):
    """Report of a session. If `error` is set, the recording is unreadable and the rest empty."""

    session: str
    recording: str
    """Path of the recording."""
    error: str | None = None
    turns: list[CallReport] = []
    checks: dict[str, VerifyCheck] = {}
    notes: list[str] = []
    experts_changed: list[float] = []
    """Share of tokens for which the model's routers choose other experts than the recorded ones, by
    layer with a router."""

    @property
    def failed(self) -> bool:
        """Whether the recording is unreadable or a check failed."""
        failures = (check.verdict is VerifyVerdict.FAIL for check in self.checks.values())
        return self.error is not None or any(failures)


def check_result(faults: list[str], detail: str = "") -> VerifyCheck:
    """Return a passed check with `detail`, or a failed one with the first fault and a count."""
    if not faults:
        return VerifyCheck(VerifyVerdict.PASS, detail)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return VerifyCheck(VerifyVerdict.FAIL, faults[0] + more)


def _check_error(error: TuglineError) -> VerifyCheck:
    """Return the check that `error` ended: failed for a `CaptureError`, else unchecked."""
    failed = isinstance(error, CaptureError)
    return VerifyCheck(VerifyVerdict.FAIL if failed else VerifyVerdict.UNCHECKED, str(error))


class VerifySummary(msgspec.Struct, kw_only=True):
    """Summary of all sessions; means are over tokens."""

    sessions: int
    failed: int
    """Number of sessions with a failed check or an unreadable recording."""
    unreadable: int
    turns: dict[str, int]
    """Calls by continuation."""
    checks: dict[str, int]
    """Checks by verdict."""
    scored: int
    """Number of sampled tokens whose log probability was recomputed."""
    max_dlogprob: float | None
    mean_dlogprob: float | None
    kl: float | None


def summarize(reports: Sequence[SessionReport]) -> VerifySummary:
    """Add up the reports of sessions."""
    turns = [turn for report in reports for turn in report.turns]
    scored = [turn for turn in turns if turn.scored]
    verdicts = [check.verdict for report in reports for check in report.checks.values()]
    return VerifySummary(
        sessions=len(reports),
        failed=sum(report.failed for report in reports),
        unreadable=sum(report.error is not None for report in reports),
        turns={kind: sum(turn.continuation is kind for turn in turns) for kind in Continuation},
        checks={verdict: verdicts.count(verdict) for verdict in VerifyVerdict},
        scored=sum(turn.scored for turn in scored),
        max_dlogprob=max((turn.max_dlogprob or 0.0 for turn in scored), default=None),
        mean_dlogprob=_weighted_mean([(turn.mean_dlogprob, turn.scored) for turn in scored]),
        kl=_weighted_mean([(turn.kl, turn.scored) for turn in scored]),
    )


def _weighted_mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    count = sum(weight for _, weight in values)
    return sum((value or 0.0) * weight for value, weight in values) / count if count else None


# --------------------------------------------------------------------------- checks
TOLERANCE = 0.1
"""Largest passing mean difference of a turn's captured and recomputed logprobs, in nats."""
MAX_LOGPROB = 1e-4
"""Largest valid log probability, above 0 due to rounding."""


def verify_session(path: Path, recording: Recording, texts: TextVerifier) -> SessionReport:
    """Check the recording read from `path`; `texts` can be shared by many sessions."""
    report = SessionReport(
        session=recording.header.session.id if recording.header else path.stem,
        recording=str(path),
        turns=_report_calls(recording),
    )
    report.checks["lineage"] = check_result([f for turn in report.turns for f in turn.faults])
    report.checks["text"] = _check_text(report, path, recording, texts)
    numbers = {call.number: _find_number_faults(call) for call in recording.calls}
    for turn in report.turns:
        turn.faults += numbers[turn.call]
    report.checks["numbers"] = check_result([f for faults in numbers.values() for f in faults])
    report.checks["ledger"], report.checks["traces"] = _check_builder(recording)
    report.notes += recording.describe_gaps()
    return report


# --------------------------------------------------------------------------- lineage and numbers
def _report_calls(recording: Recording) -> list[CallReport]:
    known: dict[int, Call] = {}
    reports = []
    for call in sorted(recording.calls, key=lambda call: call.number):
        parent = None if call.parent is None else known.get(call.parent)
        continuation, shared, reasons = trace_lineage(call, parent)
        report = CallReport(
            call=call.number,
            continuation=continuation,
            detail=", ".join(reasons),
            prompt=len(call.prompt_ids),
            shared=shared,
            sampled=len(call.sampled_ids) + call.unreported_tokens,
        )
        if continuation is Continuation.BROKEN:
            report.detail = (
                f"repeats only {shared} of the ids of call {call.parent}"
                if parent
                else f"continues call {call.parent}, which is not recorded before it"
            )
            report.faults.append(f"call {call.number} {report.detail}")
        if call.number in known:
            report.faults.append(f"call {call.number} is recorded twice")
        known[call.number] = call
        reports.append(report)
    return reports


def _find_number_faults(call: Call) -> list[str]:
    where = f"call {call.number}"
    faults = [f"{where}: {fault}" for fault in find_call_faults(call)]
    if min(call.prompt_ids.min(initial=0), call.sampled_ids.min(initial=0)) < 0:
        faults.append(f"{where} has a negative token id")
    wrong = ~np.isfinite(call.logprobs) | (call.logprobs > MAX_LOGPROB)
    if wrong.any():
        at = int(wrong.argmax())
        faults.append(f"{where} has the logprob {float(call.logprobs[at]):g} at sampled token {at}")
    if call.experts is not None and (fault := check_experts(call.experts)):
        faults.append(f"{where}: {fault}")
    faults += [f"{where}: {fault}" for fault in _find_kept_faults(call)]
    return faults


def _find_kept_faults(call: Call) -> Iterator[str]:
    if call.kept is None:
        return
    if len(call.kept) != len(call.sampled_ids):
        yield f"{len(call.kept)} kept sets of {len(call.sampled_ids)} sampled tokens"
        return
    for at, (token, kept) in enumerate(zip(call.sampled_ids.tolist(), call.kept, strict=True)):
        if len(kept) and token not in kept:
            yield f"the kept set of sampled token {at} is without its id {token}"


def _check_text(
    report: SessionReport, path: Path, recording: Recording, texts: TextVerifier
) -> VerifyCheck:
    try:
        faults = texts.find_faults(path, recording.header, recording.calls)
    except (ConfigError, CaptureError) as error:
        return _check_error(error)
    for turn in report.turns:
        turn.faults += [faults[turn.call]] if turn.call in faults else []
    return check_result([*faults.values()])


# --------------------------------------------------------------------------- ledger and traces
def _check_builder(recording: Recording) -> tuple[VerifyCheck, VerifyCheck]:
    """Build the session again; return the checks of its ledger and of its traces."""
    header = recording.header
    try:
        builder = make_builder(header.task.builder if header else PluginSpec("prefix_merging"))
        traces, ledger, _ = builder.build(recording.calls)
    except (UsageError, CaptureError) as error:
        return _check_error(error), _check_error(error)
    reasons = [*ledger.masked.items(), *ledger.dropped.items()]
    equation = f"{ledger.sampled} sampled = {ledger.trained} trainable"
    equation += "".join(f" + {count} {reason}" for reason, count in reasons)
    calls = {call.number: call for call in recording.calls}
    faults = [
        f"trace {number} differs at {span.start}-{span.end} from what call {span.call} sampled"
        for number, trace in enumerate(traces)
        for span in (trace.spans if trace.exact else ())
        if span.call not in calls or not _is_as_sampled(trace, span, calls[span.call])
    ]
    trained = sum(int(trace.mask.sum()) for trace in traces)
    if trained != ledger.trained:
        faults.append(
            f"the traces have {trained} trainable tokens, but the ledger has {ledger.trained}"
        )
    inexact = sum(not trace.exact for trace in traces)
    count = f"{len(traces)}" + (f", {inexact} of them inexact" if inexact else "")
    ledger_check = check_result(_find_ledger_faults(recording, ledger), equation)
    return ledger_check, check_result(faults, count)


def _find_ledger_faults(recording: Recording, ledger: Ledger) -> list[str]:
    faults = []
    if not ledger.balanced:
        faults.append(f"the ledger does not balance: {ledger}")
    sampled = sum(len(call.sampled_ids) + call.unreported_tokens for call in recording.calls)
    if ledger.sampled != sampled:
        faults.append(
            f"the calls have {sampled} sampled tokens, but the ledger has {ledger.sampled}"
        )
    result = recording.result
    never_built = result is not None and result.failure is not None and not result.ledger.sampled
    if result is not None and not never_built and result.ledger != ledger:
        faults.append(f"the recorded ledger is {result.ledger}, but the rebuilt one is {ledger}")
    return faults


def _is_as_sampled(trace: Trace, span: Span, call: Call) -> bool:
    size = len(call.prompt_ids)
    in_trace = slice(span.start, span.end)
    in_answer = slice(span.start - size, span.end - size)
    return (
        span.start >= size
        and np.array_equal(trace.ids[:size], call.prompt_ids)
        and np.array_equal(trace.ids[size : span.end], call.sampled_ids[: in_answer.stop])
        and np.array_equal(trace.logprobs[in_trace], call.logprobs[in_answer])
        and bool((trace.mask[in_trace] == (span.masked is None)).all())
        and (span.masked is not None or _is_decided_as_sampled(trace, span, call))
    )


def _is_decided_as_sampled(trace: Trace, span: Span, call: Call) -> bool:
    """Whether a trained span has the experts of its context, and the sets, of its call."""
    answer = slice(span.start - len(call.prompt_ids), span.end - len(call.prompt_ids))
    if call.experts is not None:
        needed = span.end - 1
        rows = call.experts[:needed]
        if trace.experts is None or len(rows) < needed:
            return False
        if not np.array_equal(trace.experts[:needed], rows):
            return False
    if call.kept is None:
        return True
    own = call.kept[answer]
    kept = None if trace.kept is None else trace.kept[span.start : span.end]
    return (
        kept is not None
        and np.array_equal(kept.sizes, own.sizes)
        and np.array_equal(kept.ids, own.ids)
    )


# --------------------------------------------------------------------------- engine
async def verify_logprobs(
    report: SessionReport, recording: Recording, scorer: Scorer, tolerance: float = TOLERANCE
) -> None:
    """Recompute every log probability and add the check ``engine``. Raises `EngineError`."""
    if report.checks["numbers"].verdict is VerifyVerdict.FAIL:
        report.checks["engine"] = VerifyCheck(
            VerifyVerdict.UNCHECKED, "the recorded numbers are not valid"
        )
        return
    recomputed = await recompute_logprobs(scorer, recording.calls)
    reasons = {call.number: why_not_comparable(call, scorer) for call in recording.calls}
    versions = sorted({span.version for call in recording.calls for span in call.versions})
    if scorer.version is None and len(versions) > 1:
        report.notes.append(
            f"sampled under versions {versions}; the engine does not report its version"
        )
    report.checks["engine"] = compare_logprobs(
        report, recording.calls, recomputed, reasons, tolerance
    )


def compare_logprobs(
    report: SessionReport,
    recorded: Sequence[Call],
    recomputed: Mapping[int, Logprobs],
    reasons: Mapping[int, str],
    tolerance: float,
) -> VerifyCheck:
    """Compare captured and recomputed logprobs by call, add the figures to the report's turns.

    `reasons` has, by call, why the two cannot be compared; empty if they can.
    """
    not_comparable: list[str] = []
    too_far: list[str] = []
    compared: list[CallReport] = []
    calls = sorted(recorded, key=lambda call: call.number)
    for turn, call in zip(report.turns, calls, strict=True):
        if call.number in recomputed:
            _compare_logprobs(turn, call, recomputed[call.number])
        reason = reasons[call.number]
        if reason:
            not_comparable.append(f"call {call.number} was {reason}")
        elif turn.mean_dlogprob is not None:
            compared.append(turn)
            if not turn.mean_dlogprob <= tolerance:
                apart = (
                    f"differ by {turn.mean_dlogprob:.3g} nats on average, more than {tolerance:g}"
                )
                too_far.append(f"call {call.number}: captured and recomputed logprobs {apart}")
                turn.faults.append(too_far[-1])
    if not_comparable:
        report.notes.append(check_result(not_comparable).detail)
    if not compared:
        detail = (*not_comparable, "no token was sampled")[0]
        return VerifyCheck(VerifyVerdict.UNCHECKED, detail)
    sums = summarize([SessionReport(session="", recording="", turns=compared)])
    figures = f"max {sums.max_dlogprob:.2g}, mean {sums.mean_dlogprob:.2g}, KL {sums.kl:.2g}"
    return check_result(too_far, f"{sums.scored} tokens: {figures}")


def _compare_logprobs(report: CallReport, call: Call, recomputed: Logprobs) -> None:
    """Add to `report` the differences of captured and recomputed logprobs."""
    apart = (call.logprobs.astype(np.float64) - recomputed)[np.isfinite(recomputed)]
    report.scored = len(apart)
    if len(apart):
        report.max_dlogprob = float(np.abs(apart).max())
        report.mean_dlogprob = float(np.abs(apart).mean())
        report.kl = float((np.exp(-apart) - 1 + apart).mean())
