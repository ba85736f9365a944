"""The evaluator of the fake agents, named ``chaos.judge:Answer`` in their tasks."""

from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.types import Reward


class Answer(Evaluator):
    """Reward 1 for an agent that wrote its answer, else 0."""

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Look only at the changed files."""
        change = outcome.patch.files.get("answer.txt")
        left = (change.text or "") if change else ""
        return Verdict(Reward(float(bool(left))), {"characters": len(left)})
