"""One trace per model call: its prompt as context, its answer to train on.

The simplest reading of a session, and the reference for the other builders: all train the same
tokens in the same contexts. Each turn repeats all turns before it, so training on a session of T
turns, and building it, costs O(T x tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tugline.traces.base import Answer, Builder, Built, TraceMeta, build_chains, make_trace
from tugline.traces.ledger import count_session
from tugline.types import Call, Trace, TraceKind


class PerRequest(Builder):
    """Traces in the order of the calls; a trace's parent is that of the call before."""

    def build(self, calls: Sequence[Call]) -> Built:
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
            meta = TraceMeta(kind, None if previous is None else index.get(previous))
            traces.append(make_trace(ids, [answer], meta, self.max_length, traces))
        return Built(tuple(traces), count_session(calls, traces))
