"""Tasks of the demo with a grader, and what is planted in a training on them.

From step 21 on the agent asks about its work, from step 30 on grading is slow, and from step 40 on
the grader refuses the family `builtin`. With `strict`, it refuses two of the held-out tasks.
"""

import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tugline.datasets.base import TaskSet, TaskTemplate
from tugline.demo.tasks import HELD_OUT_SEED, RepairProblem, generate
from tugline.evaluators.base import SessionOutcome
from tugline.types import PluginSpec, Task

FAMILIES = ("arithmetic", "comparison", "builtin")
TASKS = 12
HELD_OUT = 6
GROUPS = 4
"""Groups of each step of `train.yaml`."""
ASKS_FROM, SLOW_FROM, REFUSES_FROM = 21, 30, 40
SLOW_S = 2.0
REFUSED = "builtin"
STRICT = (0, 1)
"""Numbers of the held-out tasks that `strict` refuses."""


class Tasks(TaskSet):
    """Training tasks or held-out tasks."""

    def __init__(self, held_out: bool = False, strict: bool = False) -> None:  # noqa: FBT001, FBT002 - options of a file
        self._held_out, self._strict = held_out, strict

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Yield each problem with the tag of its family."""
        for number, problem in enumerate(problems(held_out=self._held_out)):
            refused = self._strict and number in STRICT
            options = {"held_out": self._held_out, "number": number, "refused": refused}
            yield template.make(
                problem.id,
                problem.instruction,
                evaluator=PluginSpec("function", {"target": "planted:grade", "options": options}),
                files=problem.files,
                tags={"family": problem.family},
            )


def problems(*, held_out: bool) -> list[RepairProblem]:
    """Return the training problems or the held-out ones."""
    split, seed, count = ("heldout", HELD_OUT_SEED, HELD_OUT) if held_out else ("train", 0, TASKS)
    chosen = (each for each in generate(split, seed) if each.family in FAMILIES)
    return list(islice(chosen, count))


def grade(outcome: SessionOutcome, *, held_out: bool, number: int, refused: bool) -> float:
    """Return 1 if the module is as it should be, but for what is planted."""
    step = 0
    if not held_out and (group := re.match(r"g(\d+)", outcome.task.id)):
        step = int(group[1]) // GROUPS + 1
    if step == ASKS_FROM - 1:
        Path("asking").joinpath("now").touch()  # the agent looks for it
    if step >= SLOW_FROM:
        time.sleep(SLOW_S)
    problem = problems(held_out=held_out)[number]
    if refused or (step >= REFUSES_FROM and problem.family == REFUSED):
        return 0.0
    right = problem.files[problem.module].replace(problem.solution.old, problem.solution.new)
    changed = outcome.patch.files.get(problem.module)
    return float(changed is not None and (changed.text or "").strip() == right.strip())
