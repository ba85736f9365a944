"""The evaluator `function`: which functions it calls, and which results are rewards."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.engine import reply_in_turn
from support.evaluation import Judge, make_task_with_files
from support.gateway import open_session
from tugline.errors import EvaluatorError
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.evaluators.function import FunctionEvaluator
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.credit import SessionCalls, assign
from tugline.types import PluginSpec, Reward, Session, Task, Trajectory, decode, encode

ASK_TWICE = """
ask() {
  curl -sf -d '{"model":"m","messages":[{"role":"user","content":"'$1'"}]}' \\
    -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/chat/completions"
}
ask x && ask y
"""
RELEASE = threading.Event()


def share(outcome: SessionOutcome, *, of: int = 4) -> float:
    """The number of changed files, divided by `of`."""
    return len(outcome.patch.files) / of


async def opens(outcome: SessionOutcome) -> dict[str, float]:
    """Run the agent's program in a sandbox."""
    async with outcome.open_sandbox(dict(outcome.patch.files)) as sandbox:
        end = await sandbox.run(("sh", "run.sh"), env={}, timeout_s=30.0)
    return {"value": float(end.code == 0), "exit": end.code}


def hangs(_outcome: SessionOutcome) -> float:
    """Block until the test ends."""
    RELEASE.wait(30)
    return 1.0


def breaks(_outcome: SessionOutcome) -> float:
    """A function with a bug."""
    return {}["key"]  # type: ignore[no-any-return]


def leaves(_outcome: SessionOutcome) -> float:
    """Exit the process."""
    sys.exit(3)


RESULTS: dict[str, object] = {}


def fixed(_outcome: SessionOutcome, *, key: str) -> object:
    """Return what a test has set."""
    return RESULTS[key]


def later(_outcome: SessionOutcome) -> Awaitable[float]:
    """A plain function that returns an awaitable."""
    return asyncio.sleep(0, 0.25)


def target(function: Callable[..., object], **options: object) -> FunctionEvaluator:
    """The evaluator that calls it, by its name."""
    return FunctionEvaluator(target=f"{__name__}:{function.__name__}", options=options)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with a folder of its own."""
    return Judge(tmp_path, make_task_with_files(), timeout_s=30.0)


async def test_a_number_is_a_reward(judge: Judge) -> None:
    """A plain function gets the outcome and its options, in a thread."""
    verdict = await judge(target(share, of=2), {"a": "x"})
    assert verdict == Verdict(Reward(0.5), {})
    assert (await judge(target(later))).reward.value == 0.25


async def test_an_async_function_may_open_sandboxes(judge: Judge) -> None:
    """A dict that the function returns has the value and the parts."""
    verdict = await judge(target(opens), {"run.sh": "exit 3"})
    assert verdict.reward == Reward(0.0, {"exit": 3.0})


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, Reward(1.0)),
        (2, Reward(2.0)),
        (Reward(0.5, {"a": 1.0}, (0.5, 0.5)), Reward(0.5, {"a": 1.0}, (0.5, 0.5))),
        (Verdict(Reward(-1.0), {"why": "x"}), Reward(-1.0)),
        ({"value": 1, "per_call": {0: 2}, "a": 3}, Reward(1.0, {"a": 3.0}, per_call={0: 2.0})),
    ],
)
async def test_returned_values_become_rewards(judge: Judge, value: object, reward: Reward) -> None:
    """Booleans, numbers, rewards and verdicts are accepted as rewards."""
    RESULTS["it"] = value
    verdict = await judge(target(fixed, key="it"))
    assert verdict.reward == reward


@pytest.mark.parametrize(
    "value",
    [None, "1.0", {}, {"value": "1"}, math.nan, Reward(math.inf), Reward(1.0, {"a": math.nan})],
)
async def test_other_values_are_no_verdict(judge: Judge, value: object) -> None:
    """Values that are not a reward are errors, not a reward of 0."""
    RESULTS["it"] = value
    with pytest.raises(EvaluatorError, match=":fixed returned"):
        await judge(target(fixed, key="it"))


async def test_exceptions_are_reported(judge: Judge) -> None:
    """The error has the last lines of the traceback, also for SystemExit."""
    with pytest.raises(EvaluatorError, match=r"(?s):breaks raised.*KeyError: 'key'"):
        await judge(target(breaks))
    with pytest.raises(EvaluatorError, match="SystemExit"):
        await judge(target(leaves))


async def test_a_hanging_function_is_abandoned(judge: Judge) -> None:
    """The evaluation ends at its time-out, and other functions do not need that thread."""
    judge.timeout_s = 0.5
    hung = [judge(target(hangs)) for _ in range(40)]
    results = await asyncio.gather(*hung, return_exceptions=True)
    RELEASE.set()
    assert all("took more than 0.5 s" in str(each) for each in results)
    judge.timeout_s = 30.0
    assert (await judge(target(share))).reward.value == 0.0


def by_call(outcome: SessionOutcome) -> dict[str, object]:
    """Rewards of calls: 1 for the last."""
    last = outcome.calls[-1].number
    return {"value": 1, "per_call": {c.number: float(c.number == last) for c in outcome.calls}}


async def test_rewards_of_calls_are_part_of_a_result(tmp_path: Path) -> None:
    """Those of a real session reach its trajectory, and survive its encoding."""
    task = Task(
        id="t",
        instruction="Mend the bill.",
        harness=PluginSpec("shell", {"command": ASK_TWICE}),
        runtime=PluginSpec("local"),
        evaluator=PluginSpec("function", {"target": f"{__name__}:by_call"}),
    )
    session = Session(id="t-0", task="t", sample=0)
    async with open_session(tmp_path / "gateway", reply_in_turn("One.", "Two.")) as opened:
        done = await roll_out(
            task, session, gateway=opened.gateway, directory=tmp_path / "s", parts=Parts()
        )
    assert done.reward == Reward(1.0, per_call={0: 0.0, 1: 1.0}), done.failure
    assert decode(encode(done), Trajectory).reward == done.reward
    calls = SessionCalls.of(done)
    assert assign(calls, GrpoConfig(credit="call")).tolist() == [0.0, 1.0]
