"""One trace per chain of calls, so a session of T turns costs a trainer O(tokens).

The idea is Polar's (arXiv 2605.24220): where a prompt begins with all that was asked and answered
before it, the calls are one sequence. It is applied strictly. Ids are compared, never text; what
does not fit forks into a trace of its own with its whole context, and nothing is lost. A fork's
copied context is not trained a second time: it has mask False, logprob 0 and no span.

The option ``boundary: canonical`` merges by the published rule instead (`canonical`), to compare
with. It breaks I1, so every trace it makes says ``exact=False``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tugline.traces import canonical
from tugline.traces.base import Builder, Built, Options, TraceMeta, chains, trace
from tugline.traces.ledger import balance
from tugline.types import Call, Trace

_BOUNDARIES = ("exact", "canonical")


class MergingOptions(Options, frozen=True, kw_only=True):
    """What `prefix_merging` can be told."""

    boundary: str = "exact"
    """Where one call's tokens end and the next one's begin: by their ids, or by the published
    rule."""

    @classmethod
    def wanted(cls, name: str, value: object) -> str:
        """What an option must be, if `value` is not that; else an empty text."""
        if name == "boundary":
            return "" if value in _BOUNDARIES else " or ".join(map(repr, _BOUNDARIES))
        return super().wanted(name, value)


class PrefixMerging(Builder):
    """Traces in the order in which their first calls were made."""

    def __init__(self, **options: object) -> None:
        self.options = MergingOptions.read("prefix_merging", options)

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every chain of calls a trace."""
        if self.options.boundary == "canonical":
            made = canonical.traces(calls, self.options)
        else:
            made = exact_traces(calls, self.options)
        return Built(tuple(made), balance(calls, made))


def exact_traces(calls: Sequence[Call], options: Options) -> list[Trace]:
    """A trace for every exact chain."""
    found = chains(calls)
    index = {call.number: i for i, chain in enumerate(found) for call in chain.calls}
    made: list[Trace] = []
    for chain in found:
        last = chain.calls[-1]
        ids = np.concatenate([last.prompt_ids, last.sampled_ids])
        line = TraceMeta(chain.kind, None if chain.after is None else index.get(chain.after))
        made.append(trace(ids, chain.answers(options), line, options.max_length, made))
    return made
