"""The evaluator `weighted`, with parts that a test controls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.calls import make_call
from support.engine import reply_in_turn
from support.evaluation import Judge, make_task_with_files
from support.gateway import open_session
from tugline.errors import ConfigError, EvaluatorError, SandboxError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.verdict import evaluate
from tugline.evaluators.weighted import WeightedEvaluator
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.sandbox.base import Mount
from tugline.types import PluginSpec, Reward, Session, Status, Task

RUNNING: list[str] = []


@dataclass(kw_only=True, eq=False)
class Fixed(Evaluator):
    """An evaluator with a given result."""

    sandboxes = 0

    value: float = 1.0
    fails: str = ""
    takes_s: float = 0.0
    mount: tuple[str, str | None] | None = None
    in_place: bool = False
    hides: Sequence[str] = ()
    graded_by_model: bool = False
    per_call: Mapping[int, float] | None = None

    def mounts(self, _task: Task) -> tuple[Mount, ...]:
        """`mount`, if it is given."""
        return (Mount(*self.mount),) if self.mount else ()

    def hidden(self, _task: Task) -> tuple[str, ...]:
        """The given paths."""
        return tuple(self.hides)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Wait, then give the result."""
        RUNNING.append("+")
        await asyncio.sleep(self.takes_s)
        RUNNING.append("-")
        if self.fails:
            msg = "broken"
            raise {"evaluator": EvaluatorError, "runtime": SandboxError}[self.fails](msg)
        per_call = dict(self.per_call or {})
        return Verdict(Reward(self.value, {"part": 2.0}, per_call=per_call), {"fixed": True})


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with a folder of its own."""
    return Judge(tmp_path, make_task_with_files(), timeout_s=30.0)


def part(weight: float = 1.0, *, required: bool = True, **options: Any) -> dict[str, Any]:
    """Options of a part."""
    evaluator = {"name": f"{__name__}:Fixed", "options": options}
    return {"evaluator": evaluator, "weight": weight, "required": required}


@pytest.mark.parametrize(
    ("mode", "value"), [("mean", 0.7 * 1.0 + 0.3 * 0.5), ("product", 0.5), ("min", 0.5)]
)
async def test_rewards_are_combined(judge: Judge, mode: str, value: float) -> None:
    """Rewards are combined by weight, product or minimum, and parts have their names."""
    weighted = WeightedEvaluator(parts={"a": part(7), "b": part(3, value=0.5)}, mode=mode)
    verdict = await judge(weighted)
    assert math.isclose(verdict.reward.value, value)
    assert verdict.reward.parts == {"a": 1.0, "a.part": 2.0, "b": 0.5, "b.part": 2.0}
    assert verdict.report == {"a": {"fixed": True}, "b": {"fixed": True}}


async def test_a_product_of_penalties_is_a_penalty(judge: Judge) -> None:
    """Rewards below 0 never multiply to one above it."""
    parts = {"a": part(value=-2.0), "b": part(value=-0.5), "c": part(value=3.0)}
    assert (await judge(WeightedEvaluator(parts=parts, mode="product"))).reward.value == -3.0


@pytest.mark.parametrize("fault", ["evaluator", "runtime"])
async def test_a_failed_part_is_an_error(judge: Judge, fault: str) -> None:
    """The error has the part's type, and the other parts are cancelled."""
    weighted = WeightedEvaluator(parts={"slow": part(takes_s=30.0), "a": part(fails=fault)})
    with pytest.raises((EvaluatorError, SandboxError), match="broken") as error:
        await asyncio.wait_for(judge(weighted), 20)
    assert isinstance(error.value, EvaluatorError) == (fault == "evaluator")
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("mode", ["mean", "product", "min"])
async def test_model_graded_parts_need_a_reward_of_the_others(judge: Judge, mode: str) -> None:
    """At 0 or less a graded part counts nothing, even if it fails; else its failure is an error."""
    for style in (part(graded_by_model=True), part(graded_by_model=True, fails="evaluator")):
        for value in (0.0, -0.25, -3.0):
            parts = {"tests": part(value=value), "style": style}
            verdict = await judge(WeightedEvaluator(parts=parts, mode=mode))
            assert verdict.reward.value <= 0.0
            assert verdict.reward.parts["style"] == 0.0
            assert "discounted" in verdict.report["style"]
    parts = {"tests": part(), "style": part(value=0.5, graded_by_model=True)}
    assert (await judge(WeightedEvaluator(parts=parts))).reward.value == 0.75
    parts["style"] = part(graded_by_model=True, fails="evaluator")
    with pytest.raises(EvaluatorError, match="part 'style': broken"):
        await judge(WeightedEvaluator(parts=parts))


async def test_a_part_that_is_not_required_may_fail(judge: Judge) -> None:
    """The other parts are combined without the failed one, and the report has its error."""
    weighted = WeightedEvaluator(
        parts={"a": part(1, value=0.5), "b": part(9, required=False, fails="runtime")}
    )
    verdict = await judge(weighted)
    assert verdict.reward == Reward(0.5, {"a": 0.5, "a.part": 2.0})
    assert verdict.report["b"] == {"no_verdict": "broken"}
    judge.timeout_s = 0.5
    verdict = await judge(
        WeightedEvaluator(parts={"a": part(), "b": part(required=False, takes_s=30.0)})
    )
    assert verdict.report["b"] == {"no_verdict": "time limit reached after 0.5 s"}
    with pytest.raises(EvaluatorError, match="none of the parts has a verdict"):
        await judge(WeightedEvaluator(parts={"b": part(required=False, fails="evaluator")}))


async def test_parts_run_at_once_unless_in_place(judge: Judge) -> None:
    """Parts that use the agent's sandbox run one after another."""
    RUNNING.clear()
    await judge(WeightedEvaluator(parts={"a": part(takes_s=0.05), "b": part(takes_s=0.05)}))
    assert RUNNING == ["+", "+", "-", "-"]
    RUNNING.clear()
    parts = {name: part(takes_s=0.05, in_place=True) for name in "ab"}
    await judge(WeightedEvaluator(parts=parts))
    assert RUNNING == ["+", "-", "+", "-"]


def test_needs_of_parts_are_combined() -> None:
    """Mounts, hidden paths and the use of sandboxes are those of any part."""
    parts = {"a": part(mount=["/a", "/srv/a"]), "b": part(mount=["/b", None], hides=["/x"])}
    weighted = WeightedEvaluator(parts=parts)
    assert weighted.mounts(make_task_with_files()) == (Mount("/a", "/srv/a"), Mount("/b"))
    assert weighted.hidden(make_task_with_files()) == ("/x",)
    assert not weighted.in_place
    assert weighted.sandboxes == 0
    assert WeightedEvaluator(parts={"a": part(in_place=True)}).in_place
    assert WeightedEvaluator(parts={"a": {"evaluator": {"name": "tests"}}}).sandboxes


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": part(mount=["/t", "/1"]), "b": part(mount=["/t", "/2"])}, "both mount a folder"),
        (dict.fromkeys("ab", part(mount=["/t", None], in_place=True)), "both mount a folder"),
        (
            {"a": part(in_place=True), "b": part(mount=["/t", "/1"])},
            "would expose its files to the agent",
        ),
    ],
)
def test_conflicting_folders_are_reported(parts: dict[str, Any], message: str) -> None:
    """Two folders with one path, or hidden tests that the agent would see, are errors."""
    with pytest.raises(ConfigError, match=message):
        WeightedEvaluator(parts=parts).mounts(make_task_with_files())


AGENT = """
sed -i 's/a - b/a + b/' bill.py; echo 'def test_total(): pass' > test_bill.py
curl -sf -d '{"model":"m","messages":[{"role":"user","content":"x"}]}' \\
  -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/chat/completions"
"""
ALONE = "test ! -e done && touch done && printf 'ok 1 - clean\\n1..1\\n'"


async def test_several_evaluators_in_a_rollout(tmp_path: Path) -> None:
    """Each evaluator has the patch, the calls, and a sandbox of its own."""
    alone = {"evaluator": {"name": "tests", "options": {"command": ALONE, "format": "tap"}}}
    parts = {
        "work": {"evaluator": {"name": "tests"}, "weight": 3},
        "end": {"evaluator": {"name": "session_completed"}},
        "never": part(4, value=0.0),
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
    async with open_session(tmp_path / "gateway", reply_in_turn("Done.")) as opened:
        done = await roll_out(
            graded, session, gateway=opened.gateway, directory=tmp_path / "s", parts=Parts()
        )
    assert done.status is Status.COMPLETED
    assert done.reward is not None
    assert done.reward.value == 0.6, done.report
    assert (done.reward.parts["one"], done.reward.parts["other"]) == (1.0, 1.0)
    assert done.reward.parts["work.passed"] == 1.0
    assert done.report["work"]["refused"] == {"test_bill.py": "is a file of the tests"}
    assert done.report["end"]["calls"] == 1


def call_parts(judge: Judge, mode: str, **parts: dict[str, Any]) -> tuple[WeightedEvaluator, Any]:
    """The evaluator of these parts, and the outcome of a session with calls 0 and 2."""
    calls = [make_call(0, [1], [2]), make_call(2, [1], [2])]
    return WeightedEvaluator(parts=parts, mode=mode), replace(judge.outcome({}), calls=calls)


async def test_rewards_of_calls_are_combined(judge: Judge) -> None:
    """By weight; the value of a part without them counts at the last call."""
    by_call = part(1, value=0.5, per_call={0: 0.4, 2: 0.8})
    weighted, outcome = call_parts(judge, "mean", a=part(3), b=by_call)
    reward = (await evaluate(weighted, outcome)).reward
    assert reward.per_call == pytest.approx({0: 0.1, 2: 0.75 + 0.2})
    assert reward.value == pytest.approx(0.75 + 0.125)


async def test_a_mode_that_leaves_out_rewards_of_calls_says_so(judge: Judge) -> None:
    """The report has the reason."""
    by_call = part(1, value=0.5, per_call={0: 0.4, 2: 0.8})
    weighted, outcome = call_parts(judge, "min", a=part(3), b=by_call)
    verdict = await evaluate(weighted, outcome)
    assert verdict.reward.per_call == {}
    assert verdict.report["per_call"] == "left out: only mode 'mean' combines it, not 'min'"
