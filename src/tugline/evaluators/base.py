"""The evaluator contract: from what a session left behind to a reward.

The agent's changes arrive as data, together with a factory for fresh sandboxes that have no
network; nothing runs where the agent was unless the evaluator is `in_place`. Whatever the agent
did, an endless loop or a deleted file included, results in a `Verdict`. An evaluator raises
`EvaluatorError` only when it cannot reach one; that is retried and never charged to the policy
(I5).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tugline.sandbox.base import Content, Exit, Mount, Sandbox
from tugline.sandbox.patch import Patch
from tugline.types import Call, Reward, SpentLimit, Task, Trace


class Verdict(msgspec.Struct, frozen=True):
    """The result of an evaluation."""

    reward: Reward
    report: dict[str, Any]
    """Details for people; any JSON values."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """What a session left behind: the input of an evaluation."""

    task: Task
    patch: Patch
    """Changes to the files of the task and of its workspace."""
    open_sandbox: Callable[[Mapping[str, Content]], AbstractAsyncContextManager[Sandbox]]
    """Open a new sandbox with the task's workspace, the given files over it, and the evaluator's
    `mounts`. `Task.files` are included only if given."""
    timeout_s: float
    """Time limit of the evaluation."""
    calls: Sequence[Call] = ()
    """The session's model calls, in order."""
    traces: Sequence[Trace] = ()
    """The traces built from `calls`."""
    exit: Exit | None = None
    """How the agent's program ended."""
    spent: SpentLimit | None = None
    """The budget that was spent when the agent asked for more."""
    sandbox: Sandbox | None = None
    """The agent's own sandbox, for evaluators that are `in_place`; no agent process is alive."""
    began: float = field(default_factory=time.monotonic)
    """When the evaluation began; its time limit counts from then."""


class Evaluator(ABC):
    """Scores sessions; one instance may score many at once."""

    in_place: bool = False
    """Whether to evaluate in the agent's own sandbox, which has `mounts` from the start then."""
    opens_sandbox: bool = True
    """Whether a sandbox should be prewarmed while the agent runs."""

    graded_by_model: bool = False
    """Whether a model decides, whom the agent's text might persuade."""

    @abstractmethod
    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Score one session. Raises `EvaluatorError` if no verdict can be reached."""

    def mounts(self, task: Task) -> tuple[Mount, ...]:
        """Folders that the evaluator's sandboxes need."""
        return ()

    def hidden(self, task: Task) -> tuple[str, ...]:
        """Absolute paths of folders that the agent sees empty, such as tests in an image."""
        return ()

    def agent_mounts(self, task: Task) -> tuple[Mount, ...]:
        """What the evaluator adds to the agent's sandbox."""
        hidden = tuple(Mount(path) for path in self.hidden(task))
        return hidden + (self.mounts(task) if self.in_place else ())


class SessionCompletedEvaluator(Evaluator):
    """Rewards 1 if the agent ended by itself within its budgets, else 0; its work is not examined.

    For smoke tests of a set-up, and as a part beside other evaluators (`weighted`). Has no options.
    """

    opens_sandbox = False

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Check how the session ended."""
        reason = _find_reason(outcome)
        report = {
            "reason": reason or "completed",
            "calls": len(outcome.calls),
            "exit": outcome.exit.code if outcome.exit else None,
        }
        return Verdict(Reward(float(not reason)), report)


def _find_reason(outcome: SessionOutcome) -> str:
    """Return what ended the agent; empty if it ended by itself."""
    end = outcome.exit
    if not outcome.calls:
        return "no model call"
    if end is None or end.timed_out:
        return "out of time"
    if end.cause is not None:
        return f"ended by {end.cause.value}"
    return f"{outcome.spent.value} is spent" if outcome.spent else ""
