"""Evaluate whether the agent ended by itself within its budgets; its work is not examined.

For smoke tests of a set-up, and as a part beside other evaluators (`weighted`).
"""

from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.types import Reward


class SessionCompletedEvaluator(Evaluator):
    """Rewards 1 if it did, else 0. Has no options."""

    opens_sandbox = False

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Check how the session ended."""
        reason = _find_reason(outcome)
        report = {
            "reason": reason or "completed",
            "calls": len(outcome.calls),
            "exit": outcome.exit.code if outcome.exit else None,
        }
        return Verdict(Reward(float(not reason)), report)


def _find_reason(outcome: SessionOutcome) -> str:
    """Return what ended the agent; empty if it ended by itself."""
    end = outcome.exit
    if not outcome.calls:
        return "no model call"
    if end is None or end.timed_out:
        return "out of time"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    return f"{outcome.spent.value} is spent" if outcome.spent else ""
