"""The parts that tasks name, made once and shared by all sessions that ask for the same.

Sharing lets a harness install once and an evaluator remember its verdicts. `check` is for the door
where a task comes in: a wrong name or option is an error there, not in the middle of a run.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tugline import log
from tugline.errors import TuglineError, UnknownPlugin
from tugline.evaluators.base import Evaluator
from tugline.harnesses.base import Harness
from tugline.plugins import find, make, pack_options
from tugline.sandbox.base import Runtime
from tugline.traces.base import Builder
from tugline.types import PluginSpec, Task

_log = log.get("node")
_DOES = {
    "harness": ("install", "launch"),
    "runtime": ("open", "reap", "check_available", "list_weaknesses"),
    "evaluator": ("evaluate",),
    "builder": ("build",),
}
"""What a part of each kind can do: not every class that a task can name may be called."""


class Parts:
    """Instances by kind, name and options."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, bytes], Any] = {}
        self._introduced: dict[str, asyncio.Task[None]] = {}

    def check(self, task: Task) -> None:
        """Raises `UnknownPlugin` or `ConfigError` if `task` names a part that cannot be made."""
        self.harness(task.harness)
        self.runtime(task.runtime)
        self.evaluator(task.evaluator)
        self.builder(task.builder)

    def harness(self, part: PluginSpec) -> Harness:
        """The agent program."""
        made: Harness = self._make("harness", part)
        return made

    def runtime(self, part: PluginSpec) -> Runtime:
        """The place where it runs."""
        made: Runtime = self._make("runtime", part)
        return made

    async def introduce(self, part: PluginSpec) -> None:
        """Say once, in the log, what this runtime does not keep apart on this machine."""
        if part.name not in self._introduced:
            self._introduced[part.name] = asyncio.create_task(self._introduce(part))
        await asyncio.shield(self._introduced[part.name])

    async def _introduce(self, part: PluginSpec) -> None:
        try:
            weaknesses = await asyncio.to_thread(self.runtime(part).list_weaknesses)
        except TuglineError as error:  # whatever it is, the box will say so itself
            del self._introduced[part.name]
            _log.warning("runtime cannot be looked at", runtime=part.name, error=str(error))
            return
        for weakness in weaknesses:
            _log.warning("not contained", runtime=part.name, what=weakness)

    def evaluator(self, part: PluginSpec) -> Evaluator:
        """The judge."""
        made: Evaluator = self._make("evaluator", part)
        return made

    def builder(self, part: PluginSpec) -> Builder:
        """What turns calls into traces."""
        made: Builder = self._make("builder", part)
        return made

    def _make(self, kind: str, part: PluginSpec) -> Any:
        options = pack_options(f"{kind} {part.name!r}: options", part.options)
        key = (kind, part.name, options)
        if key not in self._made:
            target = find(kind, part.name)
            if not all(callable(getattr(target, verb, None)) for verb in _DOES[kind]):
                msg = f"{part.name!r} is no {kind}: it must have {' and '.join(_DOES[kind])}"
                raise UnknownPlugin(msg)
            self._made[key] = make(kind, part.name, target, part.options)
        return self._made[key]
