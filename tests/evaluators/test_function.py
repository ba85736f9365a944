from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from judging import Judge, task
from tugline.errors import EvaluatorError
from tugline.evaluators.base import SessionOutcome, Verdict
from tugline.evaluators.function import FunctionEvaluator
from tugline.types import Reward

RELEASE = threading.Event()


def share(outcome: SessionOutcome, *, of: int = 4) -> float:
    """How many files changed, of so many."""
    return len(outcome.patch.files) / of


async def opens(outcome: SessionOutcome) -> dict[str, float]:
    """Runs the agent's program in a sandbox, which is how to do it."""
    async with outcome.open_sandbox(dict(outcome.patch.files)) as sandbox:
        end = await sandbox.run(("sh", "run.sh"), env={}, timeout_s=30.0)
    return {"value": float(end.code == 0), "exit": end.code}


def hangs(_outcome: SessionOutcome) -> float:
    """Longer than anybody waits."""
    RELEASE.wait(30)
    return 1.0


def breaks(_outcome: SessionOutcome) -> float:
    """A mistake of whoever wrote it."""
    return {}["key"]  # type: ignore[no-any-return]


def leaves(_outcome: SessionOutcome) -> float:
    """Takes nobody else down."""
    sys.exit(3)


MADE: dict[str, object] = {}


def says(_outcome: SessionOutcome, *, what: str) -> object:
    """Whatever a test wants."""
    return MADE[what]


def later(_outcome: SessionOutcome) -> Awaitable[float]:
    """Plain, but its result is awaited."""
    return asyncio.sleep(0, 0.25)


def target(function: Callable[..., object], **options: object) -> FunctionEvaluator:
    """The evaluator that calls it, by the name that a task has for it."""
    return FunctionEvaluator(target=f"{__name__}:{function.__name__}", options=options)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with a folder of its own."""
    return Judge(tmp_path, task(), timeout_s=30.0)


async def test_a_number_is_a_reward(judge: Judge) -> None:
    """A plain function gets the outcome and its options, in a thread."""
    verdict = await judge(target(share, of=2), {"a": "x"})
    assert verdict == Verdict(Reward(0.5), {})
    assert (await judge(target(later))).reward.value == 0.25


async def test_an_async_function_may_open_boxes(judge: Judge) -> None:
    """A dict is the value and its parts."""
    verdict = await judge(target(opens), {"run.sh": "exit 3"})
    assert verdict.reward == Reward(0.0, {"exit": 3.0})


@pytest.mark.parametrize(
    ("made", "reward"),
    [
        (True, Reward(1.0)),
        (2, Reward(2.0)),
        (Reward(0.5, {"a": 1.0}, (0.5, 0.5)), Reward(0.5, {"a": 1.0}, (0.5, 0.5))),
        (Verdict(Reward(-1.0), {"why": "x"}), Reward(-1.0)),
    ],
)
async def test_what_may_be_returned(judge: Judge, made: object, reward: Reward) -> None:
    """Everything that says a reward without doubt."""
    MADE["it"] = made
    verdict = await judge(target(says, what="it"))
    assert verdict.reward == reward


@pytest.mark.parametrize(
    "made",
    [None, "1.0", {}, {"value": "1"}, math.nan, Reward(math.inf), Reward(1.0, {"a": math.nan})],
)
async def test_what_is_no_reward_is_no_verdict(judge: Judge, made: object) -> None:
    """Nothing is taken for 0 in silence."""
    MADE["it"] = made
    with pytest.raises(EvaluatorError, match=":says returned"):
        await judge(target(says, what="it"))


async def test_what_it_raises_is_told(judge: Judge) -> None:
    """The last lines of the traceback, so that it can be mended; also of one that exits."""
    with pytest.raises(EvaluatorError, match=r"(?s):breaks raised.*KeyError: 'key'"):
        await judge(target(breaks))
    with pytest.raises(EvaluatorError, match="SystemExit"):
        await judge(target(leaves))


async def test_one_that_hangs_is_given_up(judge: Judge) -> None:
    """Within the time of the evaluation, and without a place that others need."""
    judge.timeout_s = 0.5
    hung = [judge(target(hangs)) for _ in range(40)]
    results = await asyncio.gather(*hung, return_exceptions=True)
    RELEASE.set()
    assert all("took over 0.5 s" in str(each) for each in results)
    judge.timeout_s = 30.0
    assert (await judge(target(share))).reward.value == 0.0
