from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from judging import DONE, Judge, call, task
from tugline.evaluators.base import SessionOutcome
from tugline.evaluators.session_completed import SessionCompletedEvaluator
from tugline.sandbox.base import Exit
from tugline.types import Cause, Limits, Message, Role, ToolCall

ASKS = Message(Role.ASSISTANT, "", (ToolCall("1", "bash", "{}"),))


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
    ("calls", "end", "limits", "reason"),
    [
        # The last turn that is allowed may be the one in which the agent says that it is done.
        ([call(0)], DONE, Limits(max_turns=1, max_sampled_tokens=3), "completed"),
        ([], DONE, Limits(), "no model call"),
        ([call(0)], Exit(-9, timed_out=True, seconds=9.0), Limits(), "out of time"),
        ([call(0)], None, Limits(), "out of time"),
        ([call(0)], Exit(137, False, 9.0, Cause.AGENT_MEMORY), Limits(), "ended by agent_memory"),
        (
            [msgspec.structs.replace(call(0), answer=ASKS)],
            DONE,
            Limits(max_turns=1),
            "out of turns",
        ),
        ([call(0)], DONE, Limits(max_sampled_tokens=2), "out of tokens"),
    ],
)
async def test_what_was_ended_is_a_nought(
    outcome: SessionOutcome, calls: list[object], end: Exit | None, limits: Limits, reason: str
) -> None:
    """By a clock, a limit of its box or a spent budget; the report says which."""
    given = msgspec.structs.replace(outcome.task, limits=limits)
    verdict = await SessionCompletedEvaluator().evaluate(
        replace(outcome, task=given, calls=calls, exit=end)  # type: ignore[arg-type]
    )
    assert verdict.reward.value == float(reason == "completed")
    assert verdict.report["reason"].startswith(reason)
