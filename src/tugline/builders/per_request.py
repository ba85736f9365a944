"""One trace per model call: its prompt as context, its answer to train on.

The plain reading of a session, and the yardstick for `prefix_merging`: both train the same tokens
in the same contexts, but here every turn repeats all turns before it, so a session of T turns
costs a trainer O(T x tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

from tugline.builders.base import Builder, Built, Options, balance, chains, trace
from tugline.types import Call, Trace


class PerRequest(Builder):
    """Traces in the order of the calls; a trace's parent is the trace of the call it carries on."""

    def __init__(self, **options: object) -> None:
        self.options = Options.read("per_request", options)

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every call a trace of its own."""
        found = chains(calls)
        numbers = sorted(call.number for chain in found for call in chain.calls)
        index = {number: i for i, number in enumerate(numbers)}
        limit = self.options.max_length
        traces: dict[int, Trace] = {}
        for chain in found:
            before = chain.after
            for call in chain.calls:
                parent = None if before is None else index.get(before)
                traces[index[call.number]] = trace(chain, [call], parent=parent, limit=limit)
                before = call.number
        ordered = tuple(traces[i] for i in sorted(traces))
        return Built(ordered, balance(calls, ordered))
