"""A step without any reward pauses, runs again, and ends with its cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from trainers.sessions import session
from tugline.errors import EngineError
from tugline.trainers.patience import back_off, run_patiently
from tugline.trainers.progress import RunProgress
from tugline.types import Boundary, Failure, Trajectory

AWAY = Failure(Boundary.EVALUATOR, "the judge is away")
LAZY = Failure(Boundary.AGENT, "out of time")


class Server:
    """A server whose sessions have these results, one list after the other."""

    def __init__(self, *rounds: list[Trajectory]) -> None:
        self.rounds = list(rounds)

    async def run(self, _tasks: Sequence[Any], _on_done: Callable[..., None]) -> list[Trajectory]:
        """The first results that are left."""
        return self.rounds[0]

    async def run_again(self, _tasks: Sequence[str]) -> frozenset[str]:
        """Go on to the next results."""
        del self.rounds[0]
        return frozenset("a")


def make(reward: float | None, failure: Failure | None = None) -> list[Trajectory]:
    """Two sessions with this end."""
    each = [session([], task="t", sample=n, reward=reward) for n in range(2)]
    return [replace(result, failure=failure) for result in each]


async def run(server: Server, patience_s: float) -> tuple[list[Trajectory], list[float], list[str]]:
    """The results, the pauses and the lines of a step."""
    pauses: list[float] = []
    lines: list[str] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    results = await run_patiently(
        server,
        [],
        "step 1",
        patience_s=patience_s,
        progress=RunProgress(lines.append),
        sleep=sleep,  # type: ignore[arg-type]
    )
    return results, pauses, lines


async def test_a_step_waits_until_its_sessions_have_rewards() -> None:
    """The pauses double; each line has the cause."""
    away = make(None, AWAY)
    results, pauses, lines = await run(Server(away, away, away, make(0.0)), 60.0)
    assert [result.reward is not None for result in results] == [True, True]
    assert pauses == [1.0, 2.0, 4.0]
    assert all("2 of 2 sessions, evaluator: the judge is away (2 times)" in each for each in lines)


async def test_the_patience_ends_with_the_cause() -> None:
    """Once the pauses add up to the patience, the error names the cause."""
    with pytest.raises(EngineError, match=r"no session of step 1 has a reward: .*judge is away"):
        await run(Server(*[make(None, AWAY)] * 5), 5.0)
    assert list(back_off(5.0)) == [1.0, 2.0, 2.0]
    assert sum(back_off(3600.0)) == 3600.0
    assert max(back_off(3600.0)) == 300.0


async def test_failures_of_agents_are_results() -> None:
    """A step whose agents failed, or with a single reward, is data of the policy (I5)."""
    for results in (make(None, LAZY), [*make(None, AWAY), *make(1.0)]):
        assert await run(Server(results), 60.0) == (results, [], [])
