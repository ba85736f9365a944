"""The published rule for merging, to compare with: raw answers between re-rendered tails.

This is our reading of what is published about the reference (arXiv 2605.24220), in these steps:

1. Calls are ordered by the length of their prompts (equals by number). A call joins the chain whose
   last prompt is the longest that begins its own; a prompt begins itself. Otherwise it starts one.
2. A chain has one end-of-turn id: the last id of the first of its answers that stopped by itself.
   A chain in which no answer did has none.
3. A trace begins with the first prompt and its answer. For each further call, what its prompt has
   beyond the prompt before is cut after the first end-of-turn id. The front is taken for the
   harness's copy of the answer before and left out, because the sampled ids stand there already;
   the rest, the tail, is appended, then the call's own answer.
4. Where that id is not found the split has failed: this call and all after it in the chain are left
   out (`Reason.UNMERGED`).

Nobody looks whether the front is that answer, nor whether the sequence is what the engine was given
(I1), so every trace says ``exact=False``. Masks and `max_length` are those of the exact rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from tugline.traces.base import Answer, Options, TraceMeta, checked, trace, untrained
from tugline.types import Call, Finish, Ids, Mode, Trace, shared_prefix


def traces(calls: Iterable[Call], options: Options) -> list[Trace]:
    """A trace for every chain, as far as its splits succeed."""
    made: list[Trace] = []
    for chain in _chains(calls):
        tails = _tails(chain)
        pieces: list[Ids] = []
        answers: list[Answer] = []
        length = 0
        for i, (call, tail) in enumerate(zip(chain, tails, strict=False)):
            why = untrained(call, i + 1 < len(tails), options.train_side)
            answers.append(Answer(call, length + len(tail), why, ()))
            pieces += (tail, call.sampled_ids)
            length += len(tail) + len(call.sampled_ids)
        line = TraceMeta(chain[0].kind, None, exact=False)
        made.append(trace(np.concatenate(pieces), answers, line, options.max_length, made))
    return made


def unplaced(calls: Iterable[Call]) -> frozenset[int]:
    """Numbers of the calls that the rule leaves out."""
    return frozenset(
        call.number for chain in _chains(calls) for call in chain[len(_tails(chain)) :]
    )


def _chains(calls: Iterable[Call]) -> list[list[Call]]:
    found: list[list[Call]] = []
    with_ids = (call for call in checked(calls) if call.mode is not Mode.TEXT)
    for call in sorted(with_ids, key=lambda call: (len(call.prompt_ids), call.number)):
        asked = call.prompt_ids
        fitting = [
            c for c in found if shared_prefix(c[-1].prompt_ids, asked) == len(c[-1].prompt_ids)
        ]
        if fitting:
            max(fitting, key=lambda chain: len(chain[-1].prompt_ids)).append(call)
        else:
            found.append([call])
    return sorted(found, key=lambda chain: chain[0].number)


def _tails(chain: Sequence[Call]) -> list[Ids]:
    """What each call's prompt adds to the trace, up to the first split that fails."""
    tails = [chain[0].prompt_ids]
    ends = [
        int(call.sampled_ids[-1])
        for call in chain
        if call.finish is Finish.STOP and call.stop is None and len(call.sampled_ids)
    ]
    for before, call in pairwise(chain):
        beyond = call.prompt_ids[len(before.prompt_ids) :]
        if not ends or ends[0] not in beyond:
            break
        tails.append(beyond[int((beyond == ends[0]).argmax()) + 1 :])
    return tails
