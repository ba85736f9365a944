"""One trace per exact chain of calls, so training on a session of T turns costs O(tokens).

The idea is Polar's (arXiv 2605.24220): calls whose prompts each begin with the prompt and answer
before are one sequence. Here it is applied strictly: ids are compared, never text, and a call that
does not fit forks into a trace of its own with its whole context. The copied context of a fork is
not trained a second time: it has mask False, logprob 0 and no span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tugline.traces.base import Builder, Built, TraceMeta, build_chains, make_trace
from tugline.traces.ledger import count_session
from tugline.types import Call, Trace


class PrefixMerging(Builder):
    """Traces in the order in which their first calls were made."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every chain of calls a trace."""
        traces = merge_prefixes(calls, max_length=self.max_length, train_side=self.train_side)
        return Built(tuple(traces), count_session(calls, traces))


def merge_prefixes(
    calls: Sequence[Call], *, max_length: int | None, train_side: bool
) -> list[Trace]:
    """Make a trace of every exact chain."""
    chains = build_chains(calls)
    index = {call.number: i for i, chain in enumerate(chains) for call in chain.calls}
    traces: list[Trace] = []
    for chain in chains:
        last, after = chain.calls[-1], chain.forked_after
        ids = np.concatenate([last.prompt_ids, last.sampled_ids])
        meta = TraceMeta(chain.kind, None if after is None else index.get(after))
        answers = chain.place_answers(train_side=train_side)
        traces.append(make_trace(ids, answers, meta, max_length, traces))
    return traces
