"""1 for an agent that came to its own end within its budgets, else 0; the work is not looked at.

For smoke tests of a set-up, and as a part beside other evaluators (`weighted`).
"""

from __future__ import annotations

from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.types import Reward


class SessionCompletedEvaluator(Evaluator):
    """No options."""

    opens_sandbox = False

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Never without a verdict."""
        reason = _reason(outcome)
        report = {
            "reason": reason or "completed",
            "calls": len(outcome.calls),
            "exit": outcome.exit.code if outcome.exit else None,
        }
        return Verdict(Reward(float(not reason)), report)


def _reason(outcome: SessionOutcome) -> str:
    """Why it was not its own end; empty if it was."""
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
