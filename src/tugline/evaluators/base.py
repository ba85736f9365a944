"""Interface of evaluators, which turn the outcome of a session into a reward.

The agent's changes are passed as data, with a factory for fresh sandboxes without network; nothing
runs in the agent's sandbox unless the evaluator is `in_place`. Anything that the agent did, such as
an endless loop or a deleted file, results in a `Verdict`. An evaluator raises `EvaluatorError` only
if it cannot reach a verdict, which is retried and never counts against the policy (I5).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tugline.patch import Patch
from tugline.sandbox.base import Content, Exit, Mount, ProgramTimeout, Sandbox
from tugline.types import Call, Reward, SpentLimit, Task, Trace


class Verdict(msgspec.Struct, frozen=True):
    """The result of an evaluation."""

    reward: Reward
    report: dict[str, Any]
    """Details for human readers; any JSON values."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """Outcome of a session, the input of an evaluation."""

    task: Task
    patch: Patch
    """Changes to the files of the task and of its workspace."""
    open_sandbox: Callable[[Mapping[str, Content]], AbstractAsyncContextManager[Sandbox]]
    """Open a new sandbox with the task's workspace, the given files over it, and the evaluator's
    `mounts`. `Task.files` must be passed to be included."""
    timeout_s: float
    """Time limit of the evaluation."""
    limit: ProgramTimeout | None = None
    """Timeout of the whole evaluation, which does not charge waits for a processor."""
    calls: Sequence[Call] = ()
    """The session's model calls, in order."""
    traces: Sequence[Trace] = ()
    """The traces built from `calls`."""
    exit: Exit | None = None
    """Exit of the agent's program."""
    spent: SpentLimit | None = None
    """The budget that the agent has exhausted, if any."""
    sandbox: Sandbox | None = None
    """The agent's sandbox, for evaluators that are `in_place`; no agent process is alive."""
    began: float = field(default_factory=time.monotonic)
    """Monotonic time of the evaluation's start, from which `timeout_s` counts."""


class Evaluator(ABC):
    """Scores sessions; one instance may score many at once."""

    in_place: bool = False
    """Whether to evaluate in the agent's sandbox, which then has `mounts` from the start."""
    sandboxes: int = 1
    """Number of sandboxes to prewarm while the agent runs."""

    graded_by_model: bool = False
    """Whether a model decides, which the agent's text might influence."""

    @abstractmethod
    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Score one session. Raises `EvaluatorError` if no verdict can be reached."""

    def check_available(self) -> str | None:
        """Return why this machine cannot use it, with a remedy; None if it can."""
        return None

    def mounts(self, task: Task) -> tuple[Mount, ...]:
        """Return the mounts of the evaluator's sandboxes."""
        return ()

    def hidden(self, task: Task) -> tuple[str, ...]:
        """Return absolute paths of folders that are empty for the agent, such as image tests."""
        return ()

    def agent_mounts(self, task: Task) -> tuple[Mount, ...]:
        """Return the mounts that the evaluator adds to the agent's sandbox."""
        hidden = tuple(Mount(path) for path in self.hidden(task))
        return hidden + (self.mounts(task) if self.in_place else ())


class SessionCompletedEvaluator(Evaluator):
    """Rewards 1 if the agent ended by itself within its budgets, else 0; ignores its work.

    For smoke tests of an installation, and as a part of `weighted`. Has no options.
    """

    sandboxes = 0

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Check whether the agent ended by itself."""
        reason = _find_reason(outcome)
        report = {
            "reason": reason or "completed",
            "calls": len(outcome.calls),
            "exit": outcome.exit.code if outcome.exit else None,
        }
        return Verdict(Reward(float(not reason)), report)


def _find_reason(outcome: SessionOutcome) -> str:
    """Return the reason why the agent was ended; empty if it ended by itself."""
    end = outcome.exit
    if not outcome.calls:
        return "the agent made no model call"
    if end is None or end.timed_out:
        return "the agent's time limit expired"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    return f"{outcome.spent.value} was reached" if outcome.spent else ""
