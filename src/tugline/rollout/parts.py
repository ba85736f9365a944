"""The plug-ins that tasks name, made once and shared by all sessions that name the same.

Sharing lets a harness install once and an evaluator cache its verdicts.
"""

import asyncio
from typing import Any, TypeVar

from tugline import log
from tugline.errors import Invalid, TuglineError, UnknownPlugin, UsageError
from tugline.evaluators.base import Evaluator
from tugline.harnesses.base import Harness
from tugline.plugins import make, pack_options
from tugline.sandbox.base import Runtime
from tugline.traces.base import Builder
from tugline.types import PluginSpec, Task

_log = log.get("node")
P = TypeVar("P")


class Parts:
    """Plug-in instances by kind, name and options; a task cannot have any other class called.

    Each method but `check` raises `UnknownPlugin` or `ConfigError` for one that cannot be made.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, bytes], Any] = {}
        self._reported: set[str] = set()
        self._reporting = asyncio.Lock()

    def check(self, task: Task) -> None:
        """Make every plug-in that `task` names. Raises one `Invalid` for all that cannot be."""
        problems: list[Invalid] = []
        for kind in ("harness", "runtime", "evaluator", "builder"):
            try:
                getattr(self, kind)(getattr(task, kind))
            except UsageError as error:
                field = "name" if isinstance(error, UnknownPlugin) else "options"
                problems.append(Invalid(str(error), field=f"{kind}.{field}"))
        if problems:
            raise Invalid.combine(problems)

    def harness(self, spec: PluginSpec) -> Harness:
        """The agent program."""
        return self._make("harness", spec, Harness)

    def runtime(self, spec: PluginSpec) -> Runtime:
        """The runtime of its sandboxes."""
        return self._make("runtime", spec, Runtime)

    def evaluator(self, spec: PluginSpec) -> Evaluator:
        """The evaluator of its outcome."""
        return self._make("evaluator", spec, Evaluator)

    def builder(self, spec: PluginSpec) -> Builder:
        """The builder of its traces."""
        return self._make("builder", spec, Builder)

    async def report_weaknesses(self, spec: PluginSpec) -> None:
        """Log once what this runtime does not isolate on this machine."""
        async with self._reporting:
            if spec.name in self._reported:
                return
            try:
                weaknesses = await asyncio.to_thread(self.runtime(spec).list_weaknesses)
            except TuglineError as error:  # opening a sandbox will raise it again
                _log.warning("runtime cannot be inspected", runtime=spec.name, error=str(error))
                return
            self._reported.add(spec.name)
            for weakness in weaknesses:
                _log.warning("not isolated", runtime=spec.name, what=weakness)

    def _make(self, kind: str, spec: PluginSpec, contract: type[P]) -> P:
        options = pack_options(f"{kind} {spec.name!r}: options", spec.options)
        key = (kind, spec.name, options)
        made: P | None = self._made.get(key)
        if made is None:
            made = self._made[key] = make(kind, spec, contract)
        return made
