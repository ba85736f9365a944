"""The groups of each step: chosen, recorded, submitted and awaited; `schedule.refill`.

All groups of a run have a place in one order. Step n, for 8 groups with a signal:

1. Round 1 is batch n, which was submitted up to `staleness` steps before.
2. A round is awaited whole, so that slow sessions count as much as fast ones.
3. Say 5 groups have a signal. Round 2 is 3 further groups, as many as are missing. Their places
   follow those of all batches that are chosen, so no task is skipped, and no group is too many.
4. The rounds end when 8 groups have a signal, or at `refill_limit` times 8 groups. The step trains
   on all of its groups: those without a signal count in its figures, pass rates and ledger.

The choice depends on the configuration, the step and the rewards of earlier groups, but never on
times. A round is recorded before it is submitted, and a resumed run repeats recorded rounds as they
were: sessions that failed outside the policy run again and may now earn another reward.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tugline.atomic import append_line, read_whole_lines
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import TrainConfig
from tugline.trainers.metrics import RolloutFigures, TrainState, find_signal, measure_rollout
from tugline.trainers.patience import run_patiently
from tugline.trainers.progress import RunProgress
from tugline.trainers.rollouts import RolloutServer
from tugline.types import Call, Task, Trajectory

ROUNDS = "rounds.jsonl"
"""File of a run's folder with a `Round` on each line, in the order of submission."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are submitted together."""

    step: int
    start: int
    """Place of the first group in the order of all groups."""
    tasks: tuple[int, ...]
    """Number of each group's task in the task set."""

    @property
    def end(self) -> int:
        """Place after the last group."""
        return self.start + len(self.tasks)


class StepGroups(NamedTuple):
    """The finished groups of a step."""

    rounds: Sequence[Round]
    numbers: dict[str, int]
    """Number of each group's task in the task set, by the id of the group."""
    results: list[Trajectory]
    calls: list[Call]
    lacking: int
    """Missing groups with a signal."""

    def measure(self, version: int, config: TrainConfig) -> RolloutFigures:
        """Measure the groups before the weights of `version` are trained on them."""
        figures = measure_rollout(self.results, self.calls, version=version, config=config.grpo)
        rounds = len(self.rounds)
        further = len(self.numbers) - len(self.rounds[0].tasks)
        return replace(figures, rounds=rounds, further=further, lacking=self.lacking)


@dataclass(eq=False)
class GroupSampler:
    """Chooses and runs the groups of a run's steps, see the module."""

    config: TrainConfig
    batches: TaskBatches
    folder: Path
    server: RolloutServer
    progress: RunProgress
    sleep: Callable[[float], Awaitable[None]]
    _submitted: int = 0
    """Step of the last submitted batch of this start of the run."""
    _recorded: dict[int, list[Round]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in read_whole_lines(self.folder / ROUNDS):
            known = msgspec.json.decode(line, type=Round)
            self._recorded.setdefault(known.step, []).append(known)

    def choose(self, state: TrainState, end: int = 0) -> TrainState:
        """Choose the next batches that are not chosen yet; the places up to `end` are taken."""
        size = self.config.schedule.tasks_per_step
        end = max(end, state.step * size)
        chosen = dict[int, tuple[int, ...]]()
        starts = dict[int, int]()
        for number in range(state.step + 1, state.step + self.config.schedule.staleness + 2):
            if number in state.chosen:
                start = state.starts.get(number, (number - 1) * size)
                batch = Round(step=number, start=start, tasks=state.chosen[number])
            elif number in self._recorded:
                batch = self._recorded[number][0]
            else:
                tasks = self.batches.choose(number, state.pass_rates, end)
                batch = Round(step=number, start=end, tasks=tasks)
            chosen[number] = batch.tasks
            starts[number] = batch.start
            end = max(end, batch.end)
        return replace(state, chosen=chosen, starts=starts)

    def list_batch(self, state: TrainState, number: int) -> list[Task]:
        """Return the tasks of the first round of step `number`, which is chosen."""
        return self.batches.batch(state.starts[number], state.chosen[number])

    async def submit(self, state: TrainState) -> None:
        """Submit the batches that may be sampled with the weights of `state`.

        Sessions of an earlier start of the run that failed outside the policy run again.
        """
        schedule = self.config.schedule
        last = min(state.step + 1 + schedule.staleness, schedule.steps)
        for number in range(max(self._submitted, state.step) + 1, last + 1):
            await self._submit_round(_first_round(state, number))
            self._submitted = number

    async def _submit_round(self, chosen: Round, *, further: bool = False) -> None:
        known = self._recorded.setdefault(chosen.step, [])
        if chosen not in known:
            append_line(self.folder / ROUNDS, msgspec.json.encode(chosen))
            known.append(chosen)
        await self.start(self.batches.batch(chosen.start, chosen.tasks, further=further))

    async def start(self, tasks: Sequence[Task]) -> None:
        """Submit tasks, and queue their sessions that failed outside the policy again."""
        await self.server.submit(tasks)
        await self.server.run_again([task.id for task in tasks])

    async def collect(self, state: TrainState) -> StepGroups:
        """Run the rounds of the next step. Raises `EngineError` if no session earned a reward."""
        number = state.step + 1
        rounds = [_first_round(state, number)]
        numbers = dict[str, int]()
        results = list[Trajectory]()
        while True:
            chosen = rounds[-1]
            further = len(rounds) > 1
            if further:
                await self._submit_round(chosen, further=True)
            tasks = self.batches.batch(chosen.start, chosen.tasks, further=further)
            numbers |= dict(zip([task.id for task in tasks], chosen.tasks, strict=True))
            name = f"step {number}, round {len(rounds)}" if further else f"step {number}"
            # a few groups that fail outside the policy do not stop a step that has others
            patient = not any(each.reward for each in results)
            results += await self.run(tasks, name, patient=patient)
            lacking = self._count_lacking(results)
            added = self._choose_further(state, rounds, lacking)
            if added is None:
                break
            self._report_round(number, lacking, len(added.tasks), len(rounds) + 1)
            rounds.append(added)
        calls = await self.server.read_calls([*numbers])
        return StepGroups(rounds, numbers, results, calls, lacking)

    async def run(
        self, tasks: Sequence[Task], name: str, *, patient: bool = True
    ) -> list[Trajectory]:
        """Run the unfinished sessions of `tasks`; see `run_patiently` if `patient`."""
        if not patient:
            return await self.server.run(tasks, partial(self.progress.count_sessions, name))
        return await run_patiently(
            self.server,
            tasks,
            name,
            patience_s=self.config.schedule.patience,
            progress=self.progress,
            sleep=self.sleep,
        )

    def _count_lacking(self, results: Sequence[Trajectory]) -> int:
        """Return how many groups with a signal are missing; 0 without `refill`."""
        schedule = self.config.schedule
        if not schedule.refill:
            return 0
        return max(0, schedule.tasks_per_step - len(find_signal(results, self.config.grpo)))

    def _choose_further(
        self, state: TrainState, rounds: Sequence[Round], lacking: int
    ) -> Round | None:
        """Return the next round of a step; None if there is none."""
        number = state.step + 1
        recorded = self._recorded[number]
        if len(rounds) < len(recorded):
            return recorded[len(rounds)]
        schedule = self.config.schedule
        limit = schedule.refill_limit * schedule.tasks_per_step
        groups = [task for each in rounds for task in each.tasks]
        count = min(lacking, limit - len(groups))
        if count <= 0:
            return None
        batches = [_first_round(state, number) for number in state.chosen]
        start = max(each.end for each in (*batches, *rounds))
        places = range(start, start + count)
        tasks = self.batches.choose_further(number, state.pass_rates, places, groups)
        return Round(step=number, start=start, tasks=tasks)

    def _report_round(self, number: int, lacking: int, added: int, which: int) -> None:
        asked = self.config.schedule.tasks_per_step
        text = f"step {number}: {asked - lacking} of {asked} groups have a signal"
        self.progress.report(f"{text}; round {which} has {added} further groups")


def _first_round(state: TrainState, number: int) -> Round:
    return Round(step=number, start=state.starts[number], tasks=state.chosen[number])
