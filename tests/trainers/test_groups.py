"""The rounds of each step: refilled by signal, the same after any kill, each group trained once."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from trainers.sessions import session
from tugline.errors import EngineError
from tugline.launch.local import OnDone
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import TrainConfig
from tugline.trainers.groups import ROUNDS, GroupSampler, Round, StepGroups
from tugline.trainers.metrics import TrainState, find_signal
from tugline.trainers.progress import RunProgress
from tugline.types import Boundary, Call, Failure, Task, Trajectory

COUNT = 12
AWAY = Failure(Boundary.EVALUATOR, "the judge is away")


class KilledError(BaseException):
    """The process ends here."""


@dataclass
class Server:
    """A server that outlives the trainer; each session's reward depends on its name only."""

    solved: float
    """Share of the tasks that every session solves, and share of those that none solves."""
    seed: int = 0
    away: float = 0.0
    """Share of the sessions whose first attempt fails outside the policy."""
    calls_left: int = -1
    """Calls until the trainer is killed; -1: never."""
    tasks: dict[str, Task] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """Number of trained steps when each task was submitted."""
    attempts: Counter[str] = field(default_factory=Counter)
    results: dict[str, Trajectory] = field(default_factory=dict)
    trained: int = 0

    def _count(self) -> None:
        if self.calls_left == 0:
            raise KilledError
        self.calls_left -= 1

    async def submit(self, tasks: Sequence[Task]) -> object:
        """Submit; a task is refused if it was submitted otherwise before, as by a server."""
        self._count()
        for task in tasks:
            assert self.tasks.setdefault(task.id, task) == task
            self.versions.setdefault(task.id, self.trained)
        self._count()
        return None

    async def run(self, tasks: Sequence[Task], on_done: OnDone) -> list[Trajectory]:
        """Run missing sessions in any order; return all results, in order."""
        names = [(task.id, sample) for task in tasks for sample in range(task.samples)]
        for task, sample in random.sample(names, len(names)):
            assert task in self.tasks
            name = f"{task}/{sample}"
            if name not in self.results:
                self._count()
                self.results[name] = self._run(task, sample)
            on_done(0, len(names))
        return [self.results[f"{task}/{sample}"] for task, sample in names]

    def _run(self, task: str, sample: int) -> Trajectory:
        self.attempts[f"{task}/{sample}"] += 1
        chance = random.Random(f"{self.seed}/{task}")
        kind = chance.random()
        chance = random.Random(f"{self.seed}/{task}/{sample}")
        reward = float(chance.random() < 0.5)
        if kind < 2 * self.solved:
            reward = float(kind < self.solved)
        if self.attempts[f"{task}/{sample}"] == 1 and chance.random() < self.away:
            return replace(session([], task=task, sample=sample, reward=None), failure=AWAY)
        return session([], task=task, sample=sample, reward=reward)

    async def run_again(self, tasks: Sequence[str]) -> frozenset[str]:
        """Forget the results of sessions that failed outside the policy."""
        self._count()
        again = [n for n, each in self.results.items() if each.task in tasks and each.failure]
        for name in again:
            del self.results[name]
        return frozenset(again)

    async def read_calls(self, _tasks: Sequence[str]) -> list[Call]:
        """No calls."""
        self._count()
        return []


@dataclass
class Run:
    """A run in a folder, whose trainer may be killed at any call and starts again."""

    config: TrainConfig
    folder: Path
    server: Server
    checkpoint: bytes = b"{}"
    steps: dict[int, StepGroups] = field(default_factory=dict)
    """Groups of each step when it was last trained."""
    lines: list[str] = field(default_factory=list)

    async def start(self) -> TrainState:
        """Train from the checkpoint to the end, with the order of calls of the training loop."""
        batches = TaskBatches(self.config, self.folder)
        state = msgspec.json.decode(self.checkpoint, type=TrainState)

        async def sleep(_pause_s: float) -> None:
            return None

        groups = GroupSampler(
            self.config, batches, self.folder, self.server, RunProgress(self.lines.append), sleep  # type: ignore[arg-type]
        )  # fmt: skip
        state = groups.choose(state)
        while state.step < self.config.schedule.steps:
            self.server.trained = state.step
            await groups.submit(state)
            done = await groups.collect(state)
            self.steps[state.step + 1] = done
            rates = batches.update_rates(state.pass_rates, done.numbers, done.results)
            state = replace(state, step=state.step + 1, pass_rates=rates)
            state = groups.choose(state, done.rounds[-1].end)
            every = self.config.schedule.checkpoint_every or 1
            if state.step % every == 0:
                self.checkpoint = msgspec.json.encode(state)
        return state

    def finish(self, kills: Sequence[int] = ()) -> TrainState:
        """Start the trainer until it ends; `kills` are numbers of calls between kills."""
        for calls in kills:
            self.server.calls_left = calls
            try:
                asyncio.run(self.start())
            except KilledError:
                continue
        self.server.calls_left = -1
        return asyncio.run(self.start())


def make(folder: Path, server: Server, **schedule: Any) -> Run:
    """A run with this schedule, on tasks of two kinds."""
    rows = [{"id": f"t{i}", "question": "?", "kind": "ab"[i % 2]} for i in range(COUNT)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"path": "tasks.jsonl", "id": "id", "instruction": "{question}", "tags": ["kind"]}
    plan = {"steps": 5, "tasks_per_step": 3, "samples": 3, "refill": True}
    config = {
        "tasks": {"taskset": {"name": "jsonl", "options": options}},
        "template": {
            "harness": {"name": "shell", "options": {"command": "true"}},
            "evaluator": {"name": "function", "options": {"target": "support.training:by_chance"}},
        },
        "schedule": plan | {"checkpoint_every": 2} | schedule,
    }
    return Run(msgspec.convert(config, TrainConfig), folder, server)


SCHEDULES = st.fixed_dictionaries(
    {
        "staleness": st.integers(0, 2),
        "choose": st.sampled_from(["order", "pass_rate"]),
        "balance": st.sampled_from([None, "kind"]),
        "refill_limit": st.integers(2, 4),
        "checkpoint_every": st.integers(1, 3),
    }
)
KILLS = st.lists(st.integers(0, 60), max_size=6)


def list_trained(run: Run) -> dict[int, Any]:
    """The groups of each step, and the sessions that were trained with their rewards."""
    return {
        step: (done.rounds, [(one.session, one.reward) for one in done.results])
        for step, done in run.steps.items()
    }


def check_places(run: Run, state: TrainState) -> None:
    """Each submitted group is trained once, and no place in the order is left out."""
    trained = [name for done in run.steps.values() for name in done.numbers]
    assert sorted(trained) == sorted(run.server.tasks)
    assert len(set(trained)) == len(trained)
    rounds = [each for done in run.steps.values() for each in done.rounds]
    waiting = [Round(step=n, start=state.starts[n], tasks=state.chosen[n]) for n in state.chosen]
    taken = [place for each in (*rounds, *waiting) for place in range(each.start, each.end)]
    assert sorted(taken) == list(range(len(taken)))
    staleness = run.config.schedule.staleness
    for step, done in run.steps.items():
        assert all(step - 1 - run.server.versions[name] <= staleness for name in done.numbers)


@settings(deadline=None, max_examples=40)
@example(
    schedule={
        "staleness": 1, "choose": "pass_rate", "balance": None, "refill_limit": 4,
        "checkpoint_every": 3,
    },
    solved=0.3, seed=1, kills=[31, 44, 17],
)  # fmt: skip
@given(
    schedule=SCHEDULES,
    solved=st.sampled_from([0.0, 0.15, 0.3, 0.5]),
    seed=st.integers(0, 99),
    kills=KILLS,
)
def test_kills_do_not_change_what_is_trained(
    schedule: dict[str, Any], solved: float, seed: int, kills: list[int]
) -> None:
    """Killed at any calls, a run trains the same groups and sessions as one without a kill."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole = make(Path(one), Server(solved, seed), **schedule)
        killed = make(Path(two), Server(solved, seed), **schedule)
        state = whole.finish()
        again = killed.finish(kills)
        assert again == state
        assert list_trained(killed) == list_trained(whole)
        assert (Path(two) / ROUNDS).read_bytes() == (Path(one) / ROUNDS).read_bytes()
        assert set(killed.server.attempts.values()) == {1}
    check_places(killed, state)
    plan = killed.config.schedule
    for done in whole.steps.values():
        signal = len(find_signal(done.results, whole.config.grpo))
        assert signal == plan.tasks_per_step - done.lacking
        limit = plan.tasks_per_step * plan.refill_limit
        assert len(done.numbers) == limit if done.lacking else len(done.numbers) <= limit


@settings(deadline=None, max_examples=40)
@given(
    schedule=SCHEDULES, away=st.sampled_from([0.1, 0.6, 1.0]), seed=st.integers(0, 99), kills=KILLS
)
def test_recovered_sessions_do_not_change_recorded_rounds(
    schedule: dict[str, Any], away: float, seed: int, kills: list[int]
) -> None:
    """Sessions that failed outside the policy earn rewards after a kill; no group gets lost."""
    with tempfile.TemporaryDirectory() as name:
        run = make(Path(name), Server(0.3, seed, away), **schedule)
        state = run.finish(kills)
        lines = (Path(name) / ROUNDS).read_bytes().splitlines()
        recorded = [msgspec.json.decode(line, type=Round) for line in lines]
    check_places(run, state)
    assert recorded == sorted(recorded, key=lambda each: each.start)
    for step, done in run.steps.items():
        assert list(done.rounds) == [each for each in recorded if each.step == step]


def test_the_order_is_kept(tmp_path: Path) -> None:
    """In the fixed order every task is trained once in an epoch, whatever had a signal."""
    run = make(tmp_path, Server(0.25), steps=8, staleness=1, balance="kind")
    run.finish()
    rounds = sorted((r for d in run.steps.values() for r in d.rounds), key=lambda each: each.start)
    numbers = [number for each in rounds for number in each.tasks]
    assert len(numbers) > 3 * COUNT
    for start in range(0, len(numbers) - COUNT, COUNT):
        assert sorted(numbers[start : start + COUNT]) == list(range(COUNT))
    assert any(len(done.rounds) > 2 for done in run.steps.values())


def test_further_rounds_are_announced_and_measured(tmp_path: Path) -> None:
    """The lines and figures of a step say how it was refilled; without `refill` there is none."""
    run = make(tmp_path, Server(0.3), steps=3)
    run.finish()
    for step, done in run.steps.items():
        figures = done.measure(0, run.config)
        assert figures.groups == 3 + figures.further
        assert (figures.rounds, figures.lacking) == (len(done.rounds), done.lacking)
        assert figures.signal == 3 - done.lacking
        said = [line for line in run.lines if line.startswith(f"step {step}: ") and "have" in line]
        assert len(said) == len(done.rounds) - 1
    assert sum(len(done.rounds) for done in run.steps.values()) > 4
    assert any("of 3 groups have a signal; round 2 has" in line for line in run.lines)
    plain = make(tmp_path, Server(0.3), refill=False)
    (tmp_path / ROUNDS).unlink()
    plain.finish()
    assert all(len(done.numbers) == 3 and not done.lacking for done in plain.steps.values())


def test_further_groups_run_before_later_batches(tmp_path: Path) -> None:
    """The tasks of a further round have a higher priority, since the step waits for them."""
    run = make(tmp_path, Server(0.3), staleness=2)
    run.finish()
    for done in run.steps.values():
        first, *others = [run.server.tasks[name].priority for name in done.numbers]
        assert first == 0
        assert others == [0] * 2 + [1] * (len(done.numbers) - 3)


def test_patience_is_for_steps_without_any_reward(tmp_path: Path) -> None:
    """Groups that fail outside the policy are replaced if others have a reward."""
    run = make(tmp_path, Server(0.0, away=1.0), patience=0)
    with pytest.raises(EngineError, match=r"no session of step 1 has a reward: .*judge is away"):
        run.finish()
    some = make(tmp_path, Server(0.0, away=0.6), patience=0)
    (tmp_path / ROUNDS).unlink()
    some.finish()
    results = [one for done in some.steps.values() for one in done.results]
    assert any(one.failure for one in results)
    assert any(len(done.rounds) > 1 for done in some.steps.values())
