"""Plug-ins that fail on purpose, named in tasks as ``support.failing_plugins:Class``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tugline import errors
from tugline.errors import ConfigError, HarnessError, SandboxError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.sandbox.base import Sandbox
from tugline.sandbox.local import LocalRuntime
from tugline.traces.base import Builder, Built, PrefixMerging
from tugline.types import Call, Reward


class Uninstallable(Harness):
    """A harness that cannot be installed."""

    name, version = "uninstallable", "1"
    error: Exception = HarnessError("uninstallable 1 cannot be installed: no such version")

    async def install(self) -> None:
        """Fail, as for a version that the registry does not have."""
        raise self.error

    def launch(self, context: LaunchContext) -> Launch:
        """Never called."""
        raise NotImplementedError


class Needy(Uninstallable):
    """A harness with a requirement that this node does not meet."""

    error = ConfigError("there is no Node here")


class OutOfOrder(Uninstallable):
    """A harness on a node whose disk fails."""

    error = OSError("Input/output error")


class Unencodable(Evaluator):
    """An evaluator whose report cannot be encoded."""

    sandboxes = 0

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Give a reward, with a report that is not text."""
        return Verdict(Reward(1.0), {"reason": "\ud800"})


class Hanging(Evaluator):
    """An evaluator that never returns."""

    sandboxes = 0

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Never ends."""
        await asyncio.Event().wait()
        return Verdict(Reward(1.0), {})


class Ending(Evaluator):
    """An evaluator whose code cancels its task, or exits."""

    sandboxes = 0

    def __init__(self, *, by: str) -> None:
        self.by = by

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Raise what must not reach the node."""
        raise asyncio.CancelledError if self.by == "cancellation" else SystemExit(3)


class EndingHarness(Uninstallable):
    """A harness whose code cancels its task."""

    error = asyncio.CancelledError()  # type: ignore[assignment]


class EndingBuilder(PrefixMerging):
    """A builder whose code exits."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Exit."""
        raise SystemExit(3)


class Crashing(Evaluator):
    """An evaluator with a bug."""

    sandboxes = 0

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Fails."""
        return Verdict(Reward({}["score"]), {})  # type: ignore[misc]


class Moody(Evaluator):
    """An evaluator that fails a number of times with an error of a given kind."""

    def __init__(self, *, failures: int, kind: str = "EvaluatorError") -> None:
        self.failures, self.error = failures, getattr(errors, kind)

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Fail, or give the reward 0.5."""
        if self.failures:
            self.failures -= 1
            msg = f"{self.failures} failures left"
            raise self.error(msg)
        return Verdict(Reward(0.5), {})


class Noting(Evaluator):
    """An evaluator that reports what was left out of the patch."""

    sandboxes = 0

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Give the reward 1, and report the notes."""
        return Verdict(Reward(1.0), {"notes": list(outcome.patch.notes)})


class Slow(LocalRuntime):
    """A runtime that is slow to start."""

    @contextlib.asynccontextmanager
    async def open(self, *args: Any) -> AsyncIterator[Sandbox]:
        """Wait, then open a sandbox."""
        await asyncio.sleep(30)
        async with super().open(*args) as sandbox:
            yield sandbox


class Dying(LocalRuntime):
    """A runtime whose sandbox is lost as soon as the agent has ended."""

    @contextlib.asynccontextmanager
    async def open(self, *args: Any) -> AsyncIterator[Sandbox]:
        """A sandbox whose `run` raises an error when the program has ended."""
        async with super().open(*args) as sandbox:
            run = sandbox.run

            async def run_and_fail(*args: Any, **options: Any) -> None:
                await run(*args, **options)
                msg = "the machine is gone"
                raise SandboxError(msg)

            sandbox.run = run_and_fail  # type: ignore[method-assign,assignment]
            yield sandbox


class Unclosed(LocalRuntime):
    """A runtime that fails to clean up."""

    @contextlib.asynccontextmanager
    async def open(self, *args: Any) -> AsyncIterator[Sandbox]:
        """A sandbox whose end is an error."""
        async with super().open(*args) as sandbox:
            yield sandbox
        msg = "cannot clear the sandbox"
        raise SandboxError(msg)


class Broken(Builder):
    """A builder with a bug."""

    def build(self, calls: Sequence[Any]) -> Built:
        """Fails."""
        raise ZeroDivisionError


class Sleepy(PrefixMerging):
    """A slow builder."""

    def build(self, calls: Sequence[Any]) -> Built:
        """Wait, then build."""
        time.sleep(4.5)
        return super().build(calls)
