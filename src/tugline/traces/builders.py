"""The two built-in builders: a trace per call, or a trace per exact chain of calls.

Both train the same tokens in the same contexts. `PerRequest` is the simplest reading of a session,
and the reference for the other; it costs O(turns x tokens), `PrefixMerging` O(tokens) (I7).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tugline.traces import base
from tugline.traces.lineage import Answer, build_chains
from tugline.types import Call, Trace, TraceKind


class PerRequest(base.Builder):
    """One trace per model call: its prompt as context, its answer to train on.

    Traces are in the order of the calls; a trace's parent is that of the call before.
    """

    def build(self, calls: Sequence[Call]) -> base.Built:
        """Give every call a trace of its own."""
        answers: list[tuple[Answer, TraceKind, int | None]] = []
        for chain in build_chains(calls):
            previous = chain.forked_after
            for answer in chain.place_answers(train_side=self.train_side):
                answers.append((answer, chain.kind, previous))
                previous = answer.call.number
        answers.sort(key=lambda numbered: numbered[0].call.number)
        index = {answer.call.number: i for i, (answer, _, _) in enumerate(answers)}
        traces: list[Trace] = []
        for answer, kind, previous in answers:
            ids = np.concatenate([answer.call.prompt_ids, answer.call.sampled_ids])
            parent = None if previous is None else index.get(previous)
            traces.append(base.make_trace(ids, [answer], kind, parent, self.max_length, traces))
        return base.Built(tuple(traces), base.count_session(calls, traces))


class PrefixMerging(base.Builder):
    """One trace per exact chain of calls, in the order of their first calls.

    The idea is Polar's (arXiv 2605.24220): calls whose prompts each begin with the prompt and
    answer before are one sequence. Here it is applied strictly: ids are compared, never text, and
    a call that does not fit forks into a trace of its own with its whole context. The copied
    context of a fork is not trained a second time: it has mask False, logprob 0 and no span.
    """

    def build(self, calls: Sequence[Call]) -> base.Built:
        """Give every chain of calls a trace."""
        chains = build_chains(calls)
        index = {call.number: i for i, chain in enumerate(chains) for call in chain.calls}
        traces: list[Trace] = []
        for chain in chains:
            last, after = chain.calls[-1], chain.forked_after
            ids = np.concatenate([last.prompt_ids, last.sampled_ids])
            parent = None if after is None else index.get(after)
            answers = chain.place_answers(train_side=self.train_side)
            trace = base.make_trace(ids, answers, chain.kind, parent, self.max_length, traces)
            traces.append(trace)
        return base.Built(tuple(traces), base.count_session(calls, traces))
