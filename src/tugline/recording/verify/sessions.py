"""Checks of one recorded session, from its recording alone or with an engine.

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


def judge(path: Path, recording: Recording, texts: Texts) -> SessionReport:
    """What the recording at `path` says of itself; `texts` may be shared by many sessions."""
    judged = SessionReport(
        session=recording.header.session.id if recording.header else path.stem,
        recording=str(path),
        turns=turns(recording.calls),
    )
    judged.checks["seams"] = settled([one for turn in judged.turns for one in turn.faults])
    judged.checks["text"] = _text(judged, path, recording, texts)
    numbers = {call.number: number_faults(call) for call in recording.calls}
    for turn in judged.turns:
        turn.faults += numbers[turn.call]
    judged.checks["numbers"] = settled([one for faults in numbers.values() for one in faults])
    judged.checks |= ledger_checks(recording)
    if recording.torn_bytes:
        judged.notes.append(f"a torn tail of {recording.torn_bytes} bytes was not read")
    if recording.damage:
        judged.notes.append(f"only what comes before the damage was judged: {recording.damage}")
    if recording.result is None:
        judged.notes.append("no result is recorded")
    return judged


def _text(judged: SessionReport, path: Path, recording: Recording, texts: Texts) -> Check:
    try:
        faults = texts.faults(path, recording.header, recording.calls)
    except ConfigError as error:
        return Check(Verdict.UNCHECKED, str(error))
    except CaptureError as error:
        return Check(Verdict.FAIL, str(error))
    for turn in judged.turns:
        turn.faults += [faults[turn.call]] if turn.call in faults else []
    return settled([*faults.values()])


async def judge_logprobs(
    judged: SessionReport, recording: Recording, scorer: Scorer, tolerance: float = TOLERANCE
) -> None:
    """Add the check `engine`: ask for every log probability again. Raises `EngineError`."""
    if judged.checks["numbers"].verdict is Verdict.FAIL:
        judged.checks["engine"] = Check(Verdict.UNCHECKED, "the recorded numbers are not whole")
        return
    again = await recompute(scorer, recording.calls)
    refused: list[str] = []
    far: list[str] = []
    compared: list[Turn] = []
    for turn, call in _pairs(judged, recording):
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
    versions = sorted({span.version for call in recording.calls for span in call.versions})
    if scorer.version is None and len(versions) > 1:
        judged.notes.append(f"sampled under versions {versions}; the engine does not tell its own")
    if compared:
        judged.checks["engine"] = settled(far, _summary(compared))
    else:
        judged.checks["engine"] = Check(Verdict.UNCHECKED, (*refused, "nothing was sampled")[0])


def _summary(compared: list[Turn]) -> str:
    sums = total([SessionReport(session="", recording="", turns=compared)])
    return (
        f"{sums.scored} tokens: max {sums.max_dlogprob:.2g}, mean {sums.mean_dlogprob:.2g}, "
        f"KL {sums.kl:.2g} (k3 {sums.kl3:.2g})"
    )


def _pairs(judged: SessionReport, recording: Recording) -> list[tuple[Turn, Call]]:
    calls = sorted(recording.calls, key=lambda call: call.number)
    return list(zip(judged.turns, calls, strict=True))
