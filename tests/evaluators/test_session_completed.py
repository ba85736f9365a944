from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from judging import Judge, call, task
from tugline.evaluators.base import SessionCompletedEvaluator, SessionOutcome
from tugline.sandbox.base import Exit
from tugline.types import Call, Cause, SpentLimit


@pytest.fixture
def outcome(tmp_path: Path) -> SessionOutcome:
    """Of a session with one call that came to its own end."""
    return replace(Judge(tmp_path, task()).outcome(), calls=[call(0, answer="Done.")])


async def test_an_end_of_its_own_is_a_one(outcome: SessionOutcome) -> None:
    """Whatever its exit code was: agents use them as they like."""
    assert (await SessionCompletedEvaluator().evaluate(outcome)).reward.value == 1.0
    failed = replace(outcome, exit=Exit(1, timed_out=False, seconds=1.0))
    verdict = await SessionCompletedEvaluator().evaluate(failed)
    assert (verdict.reward.value, verdict.report["exit"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("calls", "changes", "reason"),
    [
        ([], {}, "no model call"),
        ([call(0)], {"exit": Exit(-9, timed_out=True, seconds=9.0)}, "out of time"),
        ([call(0)], {"exit": None}, "out of time"),
        ([call(0)], {"exit": Exit(137, False, 9.0, Cause.AGENT_MEMORY)}, "ended by agent_memory"),
        ([call(0)], {"spent": SpentLimit.MAX_TURNS}, "max_turns is spent"),
    ],
)
async def test_what_was_ended_is_a_nought(
    outcome: SessionOutcome, calls: list[Call], changes: dict[str, Any], reason: str
) -> None:
    """By a clock, a limit of its box or a spent budget; the report says which."""
    ended = replace(outcome, calls=calls, **changes)
    verdict = await SessionCompletedEvaluator().evaluate(ended)
    assert (verdict.reward.value, verdict.report["reason"]) == (0.0, reason)
