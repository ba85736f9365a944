"""The published merging rule, for comparison: sampled answers between re-rendered tails.

This is our reading of the publication about the reference (arXiv 2605.24220):

1. Calls are ordered by prompt length, then by number. A call joins the chain whose last prompt is
   the longest prefix of its own prompt (an equal prompt is a prefix). If there is none, it starts a
   new chain.
2. A chain has one end-of-turn id: the last id of its first answer that ended by itself, neither cut
   nor stopped by a stop string. A chain without such an answer has none.
3. A trace begins with the first prompt and its answer. For each later call, the part of its prompt
   after the previous prompt is split behind the first end-of-turn id. The front is assumed to be
   the harness's copy of the previous answer; it is left out, because the trace has the sampled ids
   already. The rest, the tail, is appended, followed by the call's own answer.
4. If that id is missing, the split fails: this call and all later ones of the chain are left out
   (`Reason.UNMERGED`).

The rule does not check that the front is that answer, or that the sequence is what the engine was
given (I1), so every trace has ``exact=False``. Masks and `max_length` are those of the exact rule.
"""

# ruff: noqa: INP001 - beside a program, not in a package
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from tugline.traces.base import Builder, Built, count_session, make_trace
from tugline.traces.lineage import Answer, check_calls, mask_reason
from tugline.types import Call, Finish, Ids, Mode, Reason, Trace, shared_prefix


class Canonical(Builder):
    """Builds one trace for each chain, up to the first split that fails."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Merge by the published rule; left out calls are in `Built.dropped`."""
        traces: list[Trace] = []
        dropped: dict[int, Reason] = {}
        for chain in _build_chains(calls):
            tails = _split_tails(chain)
            dropped |= {call.number: Reason.UNMERGED for call in chain[len(tails) :]}
            traces.append(self._make_trace(chain[: len(tails)], tails, traces))
        ledger = count_session(calls, traces, dropped)
        return Built(tuple(traces), ledger, dropped)

    def _make_trace(
        self, chain: Sequence[Call], tails: Sequence[Ids], earlier: Sequence[Trace]
    ) -> Trace:
        pieces: list[Ids] = []
        answers: list[Answer] = []
        length = 0
        for call, tail in zip(chain, tails, strict=True):
            reason = mask_reason(call, extended=call is not chain[-1], train_side=self.train_side)
            answers.append(Answer(call, length + len(tail), reason, ()))
            pieces += (tail, call.sampled_ids)
            length += len(tail) + len(call.sampled_ids)
        ids, kind = np.concatenate(pieces), chain[0].kind
        trace = make_trace(ids, answers, kind, None, self.max_length, earlier)
        return msgspec.structs.replace(trace, exact=False)


def _build_chains(calls: Iterable[Call]) -> list[list[Call]]:
    chains: list[list[Call]] = []
    with_ids = (call for call in check_calls(calls) if call.mode is not Mode.TEXT)
    for call in sorted(with_ids, key=lambda call: (len(call.prompt_ids), call.number)):
        fitting = [
            chain
            for chain in chains
            if shared_prefix(chain[-1].prompt_ids, call.prompt_ids) == len(chain[-1].prompt_ids)
        ]
        if fitting:
            max(fitting, key=lambda chain: len(chain[-1].prompt_ids)).append(call)
        else:
            chains.append([call])
    return sorted(chains, key=lambda chain: chain[0].number)


def _split_tails(chain: Sequence[Call]) -> list[Ids]:
    """Return the ids that each call's prompt adds to the trace, up to the first failing split."""
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
