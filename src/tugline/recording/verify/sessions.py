"""Everything that can be said about one recorded session, from its segment alone or with an engine.

The checks: `seams` (every prompt goes on exactly from where it says), `text` (ids say what the
harness was told), `numbers` (logprobs and versions are whole), `ledger` and `traces` (what is
trained is what was sampled, once), and `engine` (captured logprobs are those of the model).
"""

from __future__ import annotations

from pathlib import Path

from tugline.errors import CaptureError, ConfigError
from tugline.recording.file import Recording
from tugline.recording.lineage import number_faults, turns
from tugline.recording.verify.findings import Check, SessionReport, Turn, Verdict, settled, total
from tugline.recording.verify.ledgers import ledger_checks
from tugline.recording.verify.scoring import Scorer, compare, recompute, refusal
from tugline.recording.verify.texts import Texts
from tugline.types import Call

TOLERANCE = 0.1
"""Largest mean difference of a turn's captured and recomputed logprobs that passes, in nats."""


def judge(path: Path, segment: Recording, texts: Texts) -> SessionReport:
    """What the segment at `path` says of itself; `texts` may be shared by many sessions."""
    judged = SessionReport(
        session=segment.header.session.id if segment.header else path.stem,
        segment=str(path),
        turns=turns(segment.calls),
    )
    judged.checks["seams"] = settled([one for turn in judged.turns for one in turn.faults])
    judged.checks["text"] = _text(judged, path, segment, texts)
    numbers = {call.number: number_faults(call) for call in segment.calls}
    for turn in judged.turns:
        turn.faults += numbers[turn.call]
    judged.checks["numbers"] = settled([one for faults in numbers.values() for one in faults])
    judged.checks |= ledger_checks(segment)
    if segment.torn_bytes:
        judged.notes.append(f"a torn tail of {segment.torn_bytes} bytes was not read")
    if segment.damage:
        judged.notes.append(f"only what comes before the damage was judged: {segment.damage}")
    if segment.result is None:
        judged.notes.append("no result is recorded")
    return judged


def _text(judged: SessionReport, path: Path, segment: Recording, texts: Texts) -> Check:
    try:
        faults = texts.faults(path, segment.header, segment.calls)
    except ConfigError as error:
        return Check(Verdict.UNCHECKED, str(error))
    except CaptureError as error:
        return Check(Verdict.FAIL, str(error))
    for turn in judged.turns:
        turn.faults += [faults[turn.call]] if turn.call in faults else []
    return settled([*faults.values()])


async def judge_logprobs(
    judged: SessionReport, segment: Recording, scorer: Scorer, tolerance: float = TOLERANCE
) -> None:
    """Add the check `engine`: ask for every log probability again. Raises `EngineError`."""
    if judged.checks["numbers"].verdict is Verdict.FAIL:
        judged.checks["engine"] = Check(Verdict.UNCHECKED, "the recorded numbers are not whole")
        return
    again = await recompute(scorer, segment.calls)
    refused: list[str] = []
    far: list[str] = []
    compared: list[Turn] = []
    for turn, call in _pairs(judged, segment):
        if call.number in again:
            compare(turn, call, again[call.number])
        why = refusal(call, scorer)
        if why:
            refused.append(f"call {call.number} was {why}")
        elif turn.mean_dlogprob is not None:
            compared.append(turn)
            if not turn.mean_dlogprob <= tolerance:
                apart = f"{turn.mean_dlogprob:.3g} nats apart on average, more than {tolerance:g}"
                far.append(f"call {call.number}: captured and recomputed logprobs are {apart}")
                turn.faults.append(far[-1])
    judged.notes += [settled(refused).detail] if refused else []
    versions = sorted({span.version for call in segment.calls for span in call.versions})
    if scorer.version is None and len(versions) > 1:
        judged.notes.append(f"sampled under versions {versions}; the engine does not tell its own")
    if compared:
        judged.checks["engine"] = settled(far, _summary(compared))
    else:
        judged.checks["engine"] = Check(Verdict.UNCHECKED, (*refused, "nothing was sampled")[0])


def _summary(compared: list[Turn]) -> str:
    sums = total([SessionReport(session="", segment="", turns=compared)])
    return (
        f"{sums.scored} tokens: max {sums.max_dlogprob:.2g}, mean {sums.mean_dlogprob:.2g}, "
        f"KL {sums.kl:.2g} (k3 {sums.kl3:.2g})"
    )


def _pairs(judged: SessionReport, segment: Recording) -> list[tuple[Turn, Call]]:
    calls = sorted(segment.calls, key=lambda call: call.number)
    return list(zip(judged.turns, calls, strict=True))
