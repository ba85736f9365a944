"""Cost of a training so far: the GPUs' time, without loading, and the tokens of its sessions."""

import time
from collections.abc import Callable, Sequence

from tugline.launch.prices import Prices, make_cost
from tugline.types import Trajectory, is_pass


class CostMeter:
    """Sums the cost of a run, which a resumed run continues at that of its checkpoint."""

    def __init__(
        self, prices: Prices, total: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total` is the cost before this start."""
        self._prices = prices
        self._clock = clock
        self._total = total
        self._counted = clock()
        self._reported = total

    @property
    def total(self) -> float:
        """Cost until now."""
        now = self._clock()
        self._total += self._prices.price_time(now - self._counted)
        self._counted = now
        return self._total

    def add_sessions(self, sessions: Sequence[Trajectory]) -> None:
        """Add the tokens of sessions."""
        prompt = sum(session.prompt_tokens or 0 for session in sessions)
        sampled = sum(session.ledger.sampled for session in sessions)
        self._total += self._prices.price_tokens(prompt, sampled)

    def report(self, solved: int) -> dict[str, float]:
        """Return the figures of a step; `solved` sessions of the run have solved their task.

        The step has all cost since the last one. There are none without prices.
        """
        if not self._prices.are_given:
            return {}
        total = self.total
        step = total - self._reported
        self._reported = total
        return {"cost/step": step, **make_cost(total, solved).figures}


def count_solved(sessions: Sequence[Trajectory]) -> int:
    """Return the number of sessions that solved their task."""
    return sum(each.reward is not None and is_pass(each.reward.value) for each in sessions)
