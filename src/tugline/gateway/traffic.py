"""Counters of a gateway's model calls."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tugline.histogram import MOMENTS, Distribution
from tugline.types import Call


@dataclass(slots=True)
class Traffic:
    """Counters of all recorded model calls."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls by `CallOutcome`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of requests answered with an error, by its class."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    first_token_s: Distribution = field(default_factory=lambda: Distribution(MOMENTS))
    """Seconds from the request to the first token."""
    answer_s: Distribution = field(default_factory=Distribution)
    """Seconds from the request to the last token."""

    def add(self, call: Call, prompt_tokens: int) -> None:
        """Count a recorded call."""
        times = call.timings
        self.calls[call.outcome] += 1
        self.prompt_tokens += prompt_tokens
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        if times.first_token is not None and times.last_token is not None:
            self.first_token_s.add(times.first_token - times.received)
            self.answer_s.add(times.last_token - times.received)

    @classmethod
    def total(cls, parts: Iterable["Traffic"]) -> "Traffic":
        """Return the sum of `parts`."""
        whole = cls()
        for part in parts:
            whole.calls.update(part.calls)
            whole.refused.update(part.refused)
            whole.prompt_tokens += part.prompt_tokens
            whole.sampled_tokens += part.sampled_tokens
            whole.first_token_s.merge(part.first_token_s)
            whole.answer_s.merge(part.answer_s)
        return whole
