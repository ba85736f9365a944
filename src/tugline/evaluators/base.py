"""The contract of an evaluator: from what an agent left behind to a reward, or to "no verdict".

An evaluator never runs anything in the place where the agent was (unless a task set says that it
must: `in_place`). It gets the agent's changes as data and a way to open new boxes, without any
network. Whatever the agent did is a verdict, also an endless loop or a
deleted file; only when no verdict can be had does it raise `EvaluatorError`, which is retried and
never charged to the policy (I5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from tugline.sandbox.base import Content, Exit, Mount, Sandbox
from tugline.sandbox.patch import Patch
from tugline.types import Call, Reward, Task, Trace


class Verdict(msgspec.Struct, frozen=True):
    """What is made of a session's outcome."""

    reward: Reward
    report: dict[str, Any]
    """For people: anything that JSON can hold."""


class Outcome(NamedTuple):
    """What an agent left behind."""

    task: Task
    patch: Patch
    """What it did to the files of the task and of its workspace."""
    open_box: Callable[[Mapping[str, Content]], AbstractAsyncContextManager[Sandbox]]
    """A new box with the task's workspace and, over it, the given files; `Task.files` are not in
    it unless given. Each call makes another one, with the evaluator's `mounts`."""
    timeout_s: float
    """Time that the evaluation may take."""
    calls: Sequence[Call] = ()
    """Its model calls, in order."""
    traces: Sequence[Trace] = ()
    """What was built of them."""
    exit: Exit | None = None
    """How its program ended."""
    box: Sandbox | None = None
    """Where the agent was, for evaluators that are `in_place`; its programs are dead."""


class Evaluator(Protocol):
    """Judges outcomes; one instance may judge many at once."""

    async def evaluate(self, outcome: Outcome) -> Verdict:
        """Raises `EvaluatorError` when no verdict can be had."""
        ...


def mounts(evaluator: Evaluator, task: Task) -> tuple[Mount, ...]:
    """Folders that its boxes need; its own ``mounts(task)``, else none."""
    given: Callable[[Task], tuple[Mount, ...]] = getattr(evaluator, "mounts", lambda _task: ())
    return given(task)


def hidden(evaluator: Evaluator, task: Task) -> tuple[Mount, ...]:
    """Folders that the agent's box has empty, such as tests in an image; its own ``hidden(task)``.

    That names their absolute paths; without it there are none.
    """
    paths: Callable[[Task], Sequence[str]] = getattr(evaluator, "hidden", lambda _task: ())
    return tuple(Mount(path) for path in paths(task))


def in_place(evaluator: Evaluator) -> bool:
    """Whether the agent's own box is kept for it; its ``in_place``, else no.

    The agent's box then has the evaluator's `mounts` from the start: give it no secrets there.
    """
    wanted: bool = getattr(evaluator, "in_place", False)
    return wanted


def wants_box(evaluator: Evaluator) -> bool:
    """Whether it is worth opening a box before it asks; its own ``wants_box``, else yes."""
    wants: bool = getattr(evaluator, "wants_box", True)
    return wants
