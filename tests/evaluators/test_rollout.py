"""Evaluators in a whole rollout: what a node gives them, and where their verdicts end."""

from __future__ import annotations

from pathlib import Path

import pytest

from stub_model import StubGateway
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.types import Cause, PluginSpec, Session, Status, Task, Trajectory

AGENT = """
sed -i 's/a - b/a + b/' bill.py; echo 'def test_total(): pass' > test_bill.py
curl -sf -d '{"messages":[]}' -H "Authorization: Bearer $OPENAI_API_KEY" \\
  "$OPENAI_BASE_URL/chat/completions"
"""
NOBODY = {"base_url": "http://127.0.0.1:9/v1"}
FILES = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "test_bill.py": "from bill import total\n\ndef test_total():\n    assert total(1, 2) == 3\n",
}


async def rolled(folder: Path, evaluator: PluginSpec) -> Trajectory:
    """What an agent that mends the bill, and cheats besides, is given."""
    task = Task(
        id="t",
        instruction="Mend the bill.",
        harness=PluginSpec("shell", {"command": AGENT}),
        runtime=PluginSpec("local"),
        evaluator=evaluator,
        files=FILES,
    )
    session = Session(id="t-0", task="t", sample=0)
    async with StubGateway(["Done."]).listening() as gateway:
        return await roll_out(task, session, gateway=gateway, directory=folder / "s", parts=Parts())


async def test_several_evaluators_judge_one_session(tmp_path: Path) -> None:
    """Each gets what it needs: boxes, the patch, the calls, how the program ended."""
    part = {
        "work": {"evaluator": {"name": "tests"}, "weight": 3},
        "end": {"evaluator": {"name": "session_completed"}},
        "never": {
            "evaluator": {"name": "tests", "options": {"command": "false", "format": "tap"}},
            "weight": 4,
        },
    }
    trajectory = await rolled(tmp_path, PluginSpec("weighted", {"parts": part}))
    assert trajectory.status is Status.COMPLETED
    assert trajectory.reward is not None
    assert trajectory.reward.value == 0.5, trajectory.report
    assert trajectory.reward.parts["work.passed"] == 1.0
    assert trajectory.report["work"]["refused"] == {"test_bill.py": "belongs to the tests"}
    assert trajectory.report["end"]["calls"] == 1


@pytest.mark.parametrize(
    ("evaluator", "says"),
    [
        (PluginSpec("function", {"target": "json:loads"}), "json:loads raised"),
        (
            PluginSpec("judge", {**NOBODY, "model": "m", "rubric": "r", "attempts": 1}),
            "no verdict in 1 attempts",
        ),
        (
            PluginSpec("tests", {"command": "no-such-program", "format": "tap"}),
            "exit code 127 also",
        ),
    ],
    ids=["function", "judge", "tests"],
)
async def test_no_verdict_is_a_failure_of_the_evaluator(
    tmp_path: Path, evaluator: PluginSpec, says: str
) -> None:
    """It has no reward at all, and its cause says that the policy is not charged."""
    trajectory = await rolled(tmp_path, evaluator)
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, None)
    assert trajectory.failure is not None
    assert trajectory.failure.cause is Cause.EVALUATOR
    assert says in trajectory.failure.message
