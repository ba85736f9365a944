"""Prices, and the cost of sessions.

A cost has the currency of the prices. The time of GPUs is that of a run, whether they are busy or
not; a call costs the tokens of its whole prompt, also those that an engine had cached. Attempts
that were repeated are not counted.
"""

from collections.abc import Sequence

import msgspec

from tugline.config import Config
from tugline.protocol import ResultView
from tugline.schema import NonNegativeFloat, PositiveInt
from tugline.types import is_pass, union_seconds


class Prices(Config, frozen=True):
    """Prices in any currency, in which the cost is reported; without any, no cost is."""

    gpu_hour: NonNegativeFloat = 0.0
    """Price of a GPU for an hour."""
    gpus: PositiveInt = 1
    """Number of GPUs that are paid for, of engines and trainer together."""
    prompt_tokens: NonNegativeFloat = 0.0
    """Price of a million prompt tokens."""
    sampled_tokens: NonNegativeFloat = 0.0
    """Price of a million sampled tokens."""

    @property
    def are_given(self) -> bool:
        """Whether anything has a price."""
        return any((self.gpu_hour, self.prompt_tokens, self.sampled_tokens))

    def price_time(self, seconds: float) -> float:
        """Return the cost of all GPUs for this time."""
        return self.gpu_hour * self.gpus * seconds / 3600

    def price_tokens(self, prompt: int, sampled: int) -> float:
        """Return the cost of tokens."""
        return (self.prompt_tokens * prompt + self.sampled_tokens * sampled) / 1e6


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of sessions."""

    total: float
    solved: float | None
    """`total` divided by the number of sessions that solved their task; None if none did."""

    @property
    def figures(self) -> dict[str, float]:
        """The same as figures of a run."""
        values = {"cost/total": self.total, "cost/solved": self.solved}
        return {name: value for name, value in values.items() if value is not None}


def make_cost(total: float, solved: int) -> Cost:
    """Return a cost with that of each of `solved` sessions."""
    return Cost(total=total, solved=total / solved if solved else None)


def measure_cost(results: Sequence[ResultView], prices: Prices) -> Cost | None:
    """Return the cost of a run with these results; None without prices.

    GPUs are paid for while at least one of the sessions is on a node.
    """
    if not prices.are_given:
        return None
    busy_s = union_seconds(
        (view.created - sum(view.seconds.values()), view.created) for view in results
    )
    prompt = sum(view.prompt_tokens or 0 for view in results)
    tokens = prices.price_tokens(prompt, sum(view.sampled for view in results))
    solved = sum(view.reward is not None and is_pass(view.reward) for view in results)
    return make_cost(prices.price_time(busy_s) + tokens, solved)


def describe_cost(cost: Cost | None) -> list[tuple[str, str]]:
    """Return the row of a report: name and value; none without a cost."""
    if cost is None:
        return []
    solved = "no task was solved" if cost.solved is None else f"{cost.solved:.4g} per solved task"
    return [("cost", f"{cost.total:.4g}; {solved}")]
