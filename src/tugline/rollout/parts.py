"""The plug-ins that tasks name, made once and shared by all sessions that name the same.

Sharing lets a harness install once and an evaluator cache its verdicts.
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
_CONTRACTS = {
    "harness": Harness,
    "runtime": Runtime,
    "evaluator": Evaluator,
    "builder": Builder,
}


class Parts:
    """Plug-in instances by kind, name and options; a task cannot have any other class called.

    Each method raises `UnknownPlugin` or `ConfigError` for one that cannot be made.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, bytes], Any] = {}
        self._reports: dict[str, asyncio.Task[None]] = {}

    def check(self, task: Task) -> None:
        """Make every plug-in that `task` names."""
        self.harness(task.harness)
        self.runtime(task.runtime)
        self.evaluator(task.evaluator)
        self.builder(task.builder)

    def harness(self, spec: PluginSpec) -> Harness:
        """The agent program."""
        made: Harness = self._make("harness", spec)
        return made

    def runtime(self, spec: PluginSpec) -> Runtime:
        """The runtime of its sandboxes."""
        made: Runtime = self._make("runtime", spec)
        return made

    def evaluator(self, spec: PluginSpec) -> Evaluator:
        """The evaluator of its outcome."""
        made: Evaluator = self._make("evaluator", spec)
        return made

    def builder(self, spec: PluginSpec) -> Builder:
        """The builder of its traces."""
        made: Builder = self._make("builder", spec)
        return made

    async def report_weaknesses(self, spec: PluginSpec) -> None:
        """Log once what this runtime does not isolate on this machine."""
        if spec.name not in self._reports:
            self._reports[spec.name] = asyncio.create_task(self._report_weaknesses(spec))
        await asyncio.shield(self._reports[spec.name])

    async def _report_weaknesses(self, spec: PluginSpec) -> None:
        try:
            weaknesses = await asyncio.to_thread(self.runtime(spec).list_weaknesses)
        except TuglineError as error:  # opening a sandbox will raise it again
            del self._reports[spec.name]
            _log.warning("runtime cannot be inspected", runtime=spec.name, error=str(error))
            return
        for weakness in weaknesses:
            _log.warning("not isolated", runtime=spec.name, what=weakness)

    def _make(self, kind: str, spec: PluginSpec) -> Any:
        options = pack_options(f"{kind} {spec.name!r}: options", spec.options)
        key = (kind, spec.name, options)
        if key not in self._made:
            target = find(kind, spec.name)
            if not (isinstance(target, type) and issubclass(target, _CONTRACTS[kind])):
                base = _CONTRACTS[kind]
                contract = f"{base.__module__}.{base.__name__}"
                msg = f"{spec.name!r} is no {kind}: it must be a subclass of {contract}"
                raise UnknownPlugin(msg)
            self._made[key] = make(kind, spec.name, target, spec.options)
        return self._made[key]
