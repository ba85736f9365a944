from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from judging import Judge, task
from rig import in_turn, rig
from tugline.errors import ConfigError, EvaluatorError, SandboxError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.weighted import WeightedEvaluator
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.sandbox.base import Mount
from tugline.types import PluginSpec, Reward, Session, Status, Task

RUNNING: list[str] = []


@dataclass(kw_only=True, eq=False)
class Says(Evaluator):
    """An evaluator that says what it is told to."""

    opens_sandbox = False

    value: float = 1.0
    fails: str = ""
    takes_s: float = 0.0
    mount: tuple[str, str | None] | None = None
    in_place: bool = False
    hides: Sequence[str] = ()
    graded_by_model: bool = False

    def mounts(self, _task: Task) -> tuple[Mount, ...]:
        """At most one."""
        return (Mount(*self.mount),) if self.mount else ()

    def hidden(self, _task: Task) -> tuple[str, ...]:
        """As told."""
        return tuple(self.hides)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """After its time."""
        RUNNING.append("+")
        await asyncio.sleep(self.takes_s)
        RUNNING.append("-")
        if self.fails:
            msg = "broken"
            raise {"evaluator": EvaluatorError, "runtime": SandboxError}[self.fails](msg)
        return Verdict(Reward(self.value, {"part": 2.0}), {"said": True})


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with a folder of its own."""
    return Judge(tmp_path, task(), timeout_s=30.0)


def says(weight: float = 1.0, *, required: bool = True, **options: Any) -> dict[str, Any]:
    """One part."""
    evaluator = {"name": f"{__name__}:Says", "options": options}
    return {"evaluator": evaluator, "weight": weight, "required": required}


@pytest.mark.parametrize(
    ("mode", "value"), [("mean", 0.7 * 1.0 + 0.3 * 0.5), ("product", 0.5), ("min", 0.5)]
)
async def test_rewards_are_put_together(judge: Judge, mode: str, value: float) -> None:
    """By weight, or as a product or the least; every part has its name."""
    weighted = WeightedEvaluator(parts={"a": says(7), "b": says(3, value=0.5)}, mode=mode)
    verdict = await judge(weighted)
    assert math.isclose(verdict.reward.value, value)
    assert verdict.reward.parts == {"a": 1.0, "a.part": 2.0, "b": 0.5, "b.part": 2.0}
    assert verdict.report == {"a": {"said": True}, "b": {"said": True}}


@pytest.mark.parametrize("fault", ["evaluator", "runtime"])
async def test_a_part_without_a_verdict_leaves_none(judge: Judge, fault: str) -> None:
    """It keeps its kind, which says who is to blame; the others are ended, not left behind."""
    weighted = WeightedEvaluator(parts={"slow": says(takes_s=30.0), "a": says(fails=fault)})
    with pytest.raises((EvaluatorError, SandboxError), match="broken") as error:
        await asyncio.wait_for(judge(weighted), 20)
    assert isinstance(error.value, EvaluatorError) == (fault == "evaluator")
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("mode", ["mean", "product", "min"])
async def test_a_model_adds_nothing_to_failed_work(judge: Judge, mode: str) -> None:
    """Neither by its praise nor by giving no verdict; of other work its failure leaves none."""
    for talked in (says(graded_by_model=True), says(graded_by_model=True, fails="evaluator")):
        verdict = await judge(
            WeightedEvaluator(parts={"tests": says(value=0.0), "style": talked}, mode=mode)
        )
        assert (verdict.reward.value, verdict.reward.parts["style"]) == (0.0, 0.0)
        assert "discounted" in verdict.report["style"]
    parts = {"tests": says(), "style": says(value=0.5, graded_by_model=True)}
    assert (await judge(WeightedEvaluator(parts=parts))).reward.value == 0.75
    parts["style"] = says(graded_by_model=True, fails="evaluator")
    with pytest.raises(EvaluatorError, match="part 'style': broken"):
        await judge(WeightedEvaluator(parts=parts))


async def test_a_part_that_is_not_required_may_fail(judge: Judge) -> None:
    """The rest counts as if it were alone, and the report says why."""
    weighted = WeightedEvaluator(
        parts={"a": says(1, value=0.5), "b": says(9, required=False, fails="runtime")}
    )
    verdict = await judge(weighted)
    assert verdict.reward == Reward(0.5, {"a": 0.5, "a.part": 2.0})
    assert verdict.report["b"] == {"no_verdict": "broken"}
    judge.timeout_s = 0.5
    verdict = await judge(
        WeightedEvaluator(parts={"a": says(), "b": says(required=False, takes_s=30.0)})
    )
    assert verdict.report["b"] == {"no_verdict": "out of time after 0.5 s"}
    with pytest.raises(EvaluatorError, match="no part has a verdict"):
        await judge(WeightedEvaluator(parts={"b": says(required=False, fails="evaluator")}))


async def test_parts_run_at_once_but_in_place_one_by_one(judge: Judge) -> None:
    """There is only one box in which the agent was."""
    RUNNING.clear()
    await judge(WeightedEvaluator(parts={"a": says(takes_s=0.05), "b": says(takes_s=0.05)}))
    assert RUNNING == ["+", "+", "-", "-"]
    RUNNING.clear()
    parts = {name: says(takes_s=0.05, in_place=True) for name in "ab"}
    await judge(WeightedEvaluator(parts=parts))
    assert RUNNING == ["+", "-", "+", "-"]


def test_what_parts_need_is_passed_on() -> None:
    """Their folders, the agent's sandbox, and what is hidden from it."""
    parts = {"a": says(mount=["/a", "/srv/a"]), "b": says(mount=["/b", None], hides=["/x"])}
    weighted = WeightedEvaluator(parts=parts)
    assert weighted.mounts(task()) == (Mount("/a", "/srv/a"), Mount("/b"))
    assert weighted.hidden(task()) == ("/x",)
    assert not weighted.in_place
    assert not weighted.opens_sandbox
    assert WeightedEvaluator(parts={"a": says(in_place=True)}).in_place
    assert WeightedEvaluator(parts={"a": {"evaluator": {"name": "tests"}}}).opens_sandbox


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"a": says(mount=["/t", "/1"]), "b": says(mount=["/t", "/2"])}, "both have a folder"),
        (
            {
                "a": says(mount=["/t", None], in_place=True),
                "b": says(mount=["/t", None], in_place=True),
            },
            "both have a folder",
        ),
        (
            {"a": says(in_place=True), "b": says(mount=["/t", "/1"])},
            "would show the agent its files",
        ),
    ],
)
def test_folders_that_do_not_go_together_are_named(parts: dict[str, Any], what: str) -> None:
    """Two things in one place, or hidden tests in the place where the agent is."""
    with pytest.raises(ConfigError, match=what):
        WeightedEvaluator(parts=parts).mounts(task())


AGENT = """
sed -i 's/a - b/a + b/' bill.py; echo 'def test_total(): pass' > test_bill.py
curl -sf -d '{"model":"m","messages":[{"role":"user","content":"x"}]}' \\
  -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/chat/completions"
"""
ALONE = "test ! -e done && touch done && printf 'ok 1 - clean\\n1..1\\n'"


async def test_several_evaluators_judge_one_session(tmp_path: Path) -> None:
    """In a whole rollout each gets what it needs: the patch, the calls, a sandbox of its own."""
    alone = {"evaluator": {"name": "tests", "options": {"command": ALONE, "format": "tap"}}}
    parts = {
        "work": {"evaluator": {"name": "tests"}, "weight": 3},
        "end": {"evaluator": {"name": "session_completed"}},
        "never": says(4, value=0.0),
        "one": alone,
        "other": alone,
    }
    graded = Task(
        id="t",
        instruction="Mend the bill.",
        harness=PluginSpec("shell", {"command": AGENT}),
        runtime=PluginSpec("local"),
        evaluator=PluginSpec("weighted", {"parts": parts}),
        files={
            "bill.py": "def total(a, b):\n    return a - b\n",
            "test_bill.py": "from bill import total\n\ndef test_total():\n"
            "    assert total(1, 2) == 3\n",
        },
    )
    session = Session(id="t-0", task="t", sample=0)
    async with rig(tmp_path / "gateway", in_turn("Done.")) as it:
        done = await roll_out(
            graded, session, gateway=it.gateway, directory=tmp_path / "s", parts=Parts()
        )
    assert done.status is Status.COMPLETED
    assert done.reward is not None
    assert done.reward.value == 0.6, done.report
    assert (done.reward.parts["one"], done.reward.parts["other"]) == (1.0, 1.0)
    assert done.reward.parts["work.passed"] == 1.0
    assert done.report["work"]["refused"] == {"test_bill.py": "belongs to the tests"}
    assert done.report["end"]["calls"] == 1
