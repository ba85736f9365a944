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
_CONTRACTS = {"harness": Harness, "runtime": Runtime, "evaluator": Evaluator}
_METHODS = {
    "builder": ("build",),
}


class Parts:
    """Plug-in instances by kind, name and options.

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
            _check_contract(kind, spec.name, target)
            self._made[key] = make(kind, spec.name, target, spec.options)
        return self._made[key]


def _check_contract(kind: str, name: str, target: Any) -> None:
    """Raises `UnknownPlugin` for a class that is no `kind`: a task may not call any class."""
    if base := _CONTRACTS.get(kind):
        if not (isinstance(target, type) and issubclass(target, base)):
            msg = (
                f"{name!r} is no {kind}: it must be a subclass of {base.__module__}.{base.__name__}"
            )
            raise UnknownPlugin(msg)
    elif not all(callable(getattr(target, method, None)) for method in _METHODS[kind]):
        msg = f"{name!r} is no {kind}: it must have {' and '.join(_METHODS[kind])}"
        raise UnknownPlugin(msg)
