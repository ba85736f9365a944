"""Whether each prompt goes on, id for id, from the call that it is recorded to go on from (I1).

Also whether the numbers of a call are whole: a finite log probability, at most 0, and a policy
version for every sampled token. Pure; the cost is one comparison of ids per call (I7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from tugline.recording.verify.findings import Seam, Turn
from tugline.types import Call, CallOutcome, Mode, shared_prefix

CERTAIN = 1e-4
"""How far above 0 rounding may lift a log probability."""


def turns(calls: Sequence[Call]) -> list[Turn]:
    """One for each call, in the order of their numbers."""
    known: dict[int, Call] = {}
    found = []
    for call in sorted(calls, key=lambda call: call.number):
        found.append(_turn(call, known))
        if call.number in known:
            found[-1].faults.append(f"call {call.number} is recorded twice")
        known[call.number] = call
    return found


def _turn(call: Call, known: Mapping[int, Call]) -> Turn:
    parent = None if call.parent is None else known.get(call.parent)
    shared = 0 if parent is None else held(call, parent)
    status, why = _seam(call, parent, shared)
    turn = Turn(
        call=call.number,
        status=status,
        why=why,
        prompt=len(call.prompt_ids),
        shared=shared,
        sampled=len(call.sampled_ids) + call.unreported_tokens,
    )
    if status is Seam.BROKEN:
        turn.faults.append(f"call {call.number} {why}")
    return turn


def _seam(call: Call, parent: Call | None, shared: int) -> tuple[Seam, str]:
    if call.mode is Mode.TEXT or (parent is not None and parent.mode is Mode.TEXT):
        return Seam.UNTOLD, "the engine told no ids"
    if parent is None and call.parent is not None:
        return Seam.BROKEN, f"goes on from call {call.parent}, which is not recorded before it"
    whole = 0 if parent is None else len(parent.prompt_ids) + len(parent.sampled_ids)
    if call.branch is not None:
        along = f", yet with all ids of call {call.parent}" if 0 < whole == shared else ""
        return Seam.FORKED, f"{call.branch}{along}"
    if parent is not None and shared < whole:
        kept = shared - len(parent.prompt_ids)
        if parent.outcome is CallOutcome.CLIENT_GONE and kept >= 0:
            return Seam.FORKED, f"broken_off after {kept} ids that call {call.parent} sampled"
        return Seam.BROKEN, f"has only {shared} of the {whole} ids of call {call.parent}"
    return (Seam.HEALED, ", ".join(call.echo_changes)) if call.echo_changes else (Seam.EXACT, "")


def held(call: Call, parent: Call) -> int:
    """How many leading ids of `parent`, prompt and answer, the prompt of `call` has."""
    asked = len(parent.prompt_ids)
    shared = shared_prefix(parent.prompt_ids, call.prompt_ids)
    if shared < asked:
        return shared
    return asked + shared_prefix(parent.sampled_ids, call.prompt_ids[asked:])


def number_faults(call: Call) -> list[str]:
    """What is wrong with the ids, log probabilities and versions of one call."""
    where, sampled = f"call {call.number}", len(call.sampled_ids)
    faults = []
    if call.mode is not Mode.TEXT and not len(call.prompt_ids):
        faults.append(f"{where} has no prompt ids")
    if min(call.prompt_ids.min(initial=0), call.sampled_ids.min(initial=0)) < 0:
        faults.append(f"{where} has an id below 0")
    if len(call.logprobs) != sampled:
        faults.append(f"{where} has {sampled} sampled ids but {len(call.logprobs)} logprobs")
    wrong = ~np.isfinite(call.logprobs) | (call.logprobs > CERTAIN)
    if wrong.any():
        place = int(wrong.argmax())
        value = float(call.logprobs[place])
        faults.append(f"{where} has the logprob {value:g} at sampled token {place}")
    bounds = [(0, 0), *((span.start, span.end) for span in call.versions), (sampled, sampled)]
    if any(start > end for start, end in bounds) or any(
        end != start for (_, end), (start, _) in pairwise(bounds)
    ):
        spans = ", ".join(f"{span.start}-{span.end}" for span in call.versions) or "none"
        faults.append(f"{where} has versions for {spans} of {sampled} sampled tokens")
    return faults
