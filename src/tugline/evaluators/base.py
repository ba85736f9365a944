"""The contract of an evaluator: from what an agent left behind to a reward, or to "no verdict".

An evaluator never runs anything in the place where the agent was. It gets the agent's changes as
text and a way to open new boxes. Whatever the agent did is a verdict, also an endless loop or a
deleted file; only when no verdict can be had does it raise `EvaluatorError`, which is retried and
never charged to the policy (I5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from tugline.evaluators.patch import Patch
from tugline.runtimes.base import Box
from tugline.types import Reward


class Verdict(msgspec.Struct, frozen=True):
    """What is made of a session's outcome."""

    reward: Reward
    report: dict[str, Any]
    """For people: anything that JSON can hold."""


class Outcome(NamedTuple):
    """What an agent left behind."""

    files: Mapping[str, str]
    """The task's files as the agent found them."""
    patch: Patch
    """What it did to them."""
    open_box: Callable[[Mapping[str, str]], AbstractAsyncContextManager[Box]]
    """A new box whose workdir holds the given files; each call makes another one."""
    timeout_s: float
    """Time that the evaluation may take."""


class Evaluator(Protocol):
    """Judges outcomes; one instance may judge many at once."""

    async def evaluate(self, outcome: Outcome) -> Verdict:
        """Raises `EvaluatorError` when no verdict can be had."""
        ...


def wants_box(evaluator: Evaluator) -> bool:
    """Whether it is worth opening a box before it asks; its own ``wants_box``, else yes."""
    wants: bool = getattr(evaluator, "wants_box", True)
    return wants
