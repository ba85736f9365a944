"""EVAL: evaluate what an agent left, in time, and once more if there was no verdict."""

import dataclasses
import time

from tugline import errors, log
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.verdict import evaluate
from tugline.rollout.stages import StageSlots
from tugline.sandbox.base import ProgramTimeout

_log = log.get("node")


async def evaluate_outcome(
    evaluator: Evaluator, outcome: SessionOutcome, slots: StageSlots, session: str
) -> Verdict:
    """Evaluate an outcome, with one repetition if the first evaluation gave no verdict.

    `session` is named in the log. `outcome.limit` and `outcome.began` are set for each evaluation.
    Raises the error of the second one: `EvaluatorError`, `SandboxError`, `TimeoutError`, or another
    of the evaluator's own code.
    """
    try:
        return await _evaluate_once(evaluator, outcome, slots)
    except (errors.EvaluatorError, errors.SandboxError, TimeoutError) as error:
        _log.warning("evaluation repeated", session=session, error=str(error))
        return await _evaluate_once(evaluator, outcome, slots)


async def _evaluate_once(
    evaluator: Evaluator, outcome: SessionOutcome, slots: StageSlots
) -> Verdict:
    limit = ProgramTimeout(outcome.timeout_s + slots.eval_grace_s)
    began = time.monotonic()
    try:
        async with limit.enforce():
            return await evaluate(evaluator, dataclasses.replace(outcome, limit=limit, began=began))
    finally:
        slots.note_waits(limit.waited_s, time.monotonic() - began)
