"""The evaluator `session_completed`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.calls import make_call
from support.evaluation import Judge, make_task_with_files
from tugline.evaluators.base import SessionCompletedEvaluator
from tugline.sandbox.base import Exit
from tugline.types import Call, Cause, SpentLimit

CALL = make_call(0, [1], [2])


@pytest.mark.parametrize(
    ("calls", "changes", "value", "reason"),
    [
        ([CALL], {}, 1.0, "completed"),
        # Any exit code will do.
        ([CALL], {"exit": Exit(1, timed_out=False, seconds=1.0)}, 1.0, "completed"),
        ([], {}, 0.0, "the agent made no model call"),
        (
            [CALL],
            {"exit": Exit(-9, timed_out=True, seconds=9.0)},
            0.0,
            "the agent's time limit expired",
        ),
        ([CALL], {"exit": None}, 0.0, "the agent's time limit expired"),
        ([CALL], {"exit": Exit(137, False, 9.0, Cause.AGENT_MEMORY)}, 0.0, "agent_memory"),
        ([CALL], {"spent": SpentLimit.MAX_TURNS}, 0.0, "max_turns was reached"),
    ],
)
async def test_the_reward_is_1_if_the_agent_ended_by_itself(
    tmp_path: Path, calls: list[Call], changes: dict[str, Any], value: float, reason: str
) -> None:
    """The reward is 0 if a time-out, a sandbox limit or a spent budget ended the agent."""
    outcome = replace(Judge(tmp_path, make_task_with_files()).outcome(), calls=calls, **changes)
    verdict = await SessionCompletedEvaluator().evaluate(outcome)
    assert verdict.reward.value == value
    assert reason in verdict.report["reason"]
