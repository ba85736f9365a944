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
    end, calls, limits = outcome.exit, outcome.calls, outcome.task.limits
    if not calls:
        return "no model call"
    if end is None or end.timed_out:
        return "out of time"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    asks = calls[-1].answer is not None and bool(calls[-1].answer.tool_calls)
    if limits.max_turns is not None and len(calls) >= limits.max_turns and asks:
        return f"out of turns (max_turns is {limits.max_turns})"
    sampled = sum(len(call.sampled_ids) + call.unreported_tokens for call in calls)
    if limits.max_sampled_tokens is not None and sampled >= limits.max_sampled_tokens:
        return f"out of tokens (max_sampled_tokens is {limits.max_sampled_tokens})"
    return ""
