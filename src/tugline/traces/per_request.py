"""One trace per model call: its prompt as context, its answer to train on.

The plain reading of a session, and the yardstick for the others: all train the same tokens in the
same contexts, but here every turn repeats all turns before it, so a session of T turns costs a
trainer O(T x tokens), and so does building it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tugline.traces.base import Answer, Builder, Built, Options, TraceMeta, chains, trace
from tugline.traces.ledger import balance
from tugline.types import Call, Trace, TraceKind


class PerRequest(Builder):
    """Traces in the order of the calls; a trace's parent is the trace of the call it carries on."""

    def __init__(self, **options: object) -> None:
        self.options = Options.read("per_request", options)

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every call a trace of its own."""
        answers: list[tuple[Answer, TraceKind, int | None]] = []
        for chain in chains(calls):
            before = chain.after
            for answer in chain.answers(self.options):
                answers.append((answer, chain.kind, before))
                before = answer.call.number
        answers.sort(key=lambda one: one[0].call.number)
        index = {answer.call.number: i for i, (answer, _, _) in enumerate(answers)}
        made: list[Trace] = []
        for answer, kind, before in answers:
            ids = np.concatenate([answer.call.prompt_ids, answer.call.sampled_ids])
            line = TraceMeta(kind, None if before is None else index.get(before))
            made.append(trace(ids, [answer], line, self.options.max_length, made))
        return Built(tuple(made), balance(calls, made))
