"""One trace per exact chain of calls, so a session of T turns costs a trainer O(tokens).

The idea is Polar's (arXiv 2605.24220): where a prompt begins with all that was asked and answered
before it, the calls are one sequence. It is applied strictly. Ids are compared, never text; what
does not fit forks into a trace of its own with its whole context, and nothing is lost. A fork's
copied context is not trained a second time: it has mask False, logprob 0 and no span.
"""

from __future__ import annotations

from collections.abc import Sequence

from tugline.builders.base import Builder, Built, Options, balance, chains, trace
from tugline.types import Call


class PrefixMerging(Builder):
    """Traces in the order in which their first calls were made."""

    def __init__(self, **options: object) -> None:
        self.options = Options.read("prefix_merging", options)

    def build(self, calls: Sequence[Call]) -> Built:
        """Give every exact chain of calls a trace."""
        found = chains(calls)
        index: dict[int | None, int] = {
            c.number: i for i, chain in enumerate(found) for c in chain.calls
        }
        traces = tuple(
            trace(chain, chain.calls, parent=index.get(chain.after), limit=self.options.max_length)
            for chain in found
        )
        return Built(traces, balance(calls, traces))
