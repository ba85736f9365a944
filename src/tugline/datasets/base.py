"""The contract of a task set: from a benchmark's own files to tasks, one for each instance.

What an instance says (its instruction, where it begins, how it is judged) comes from the set; what
a run decides (harness, runtime, samples, limits) comes from a `Template`, the same for all. Where
both speak, the template wins, so that a run can be stricter than the benchmark's author was.

A set that knows a reference solution gives it (`solution`), so that a task is tried before a model
is trained on it: the solution must earn 1 and nothing at all less.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tugline.errors import ConfigError
from tugline.sandbox.base import Content, Mount
from tugline.task_files import parse_task
from tugline.types import Limits, PluginSpec, Task, Workspace

INSTANCE = "instance"
"""The tag with an instance's own name."""
SPLIT = "split"
"""The tag with the part of a set that an instance belongs to."""
TASKSET = "taskset"
"""The tag with the name of the set."""

_SET_BY_EACH = ("id", "files", "workspace")
_WORD = "{instruction}"
_LONGEST_ID = 128


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """What a perfect agent would do."""

    changes: Mapping[str, Content] = {}
    """Laid over the workdir."""
    home: Mapping[str, Content] = {}
    """Put into the agent's home, for `argv` to use."""
    argv: tuple[str, ...] = ()
    """Run in the workdir after that; none for changes alone. Must end with exit code 0."""
    env: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    """What only the solution sees."""


class TaskSet(ABC):
    """A set of tasks. A `path` among its options has been made absolute before."""

    @abstractmethod
    def tasks(self, template: Template) -> Iterator[Task]:
        """The tasks, in the order of the source, as they are asked for.

        Raises `ConfigError` that names the file, the instance, the field and its value.
        """

    def solution(self, task: Task) -> Solution | None:
        """The reference solution of one of its tasks; None if there is none."""
        return None


class Template(msgspec.Struct, frozen=True):
    """What all tasks of a run have in common."""

    task: Task
    """Its `id` is put before that of each instance."""
    given: frozenset[str]
    """Fields that were said, such as ``runtime`` and ``limits.agent_s``; the rest is default."""

    @classmethod
    def read(cls, values: Any, where: str, folder: Path, *, prefix: str = "") -> Template:
        """From the keys and values of a task file without what each instance has of its own.

        Raises `ConfigError`.
        """
        raw = dict(values) if isinstance(values, dict) else values
        for name in _SET_BY_EACH:
            if isinstance(raw, dict) and name in raw:
                msg = f"{where}: {name} is each instance's own; leave it out of the template"
                raise ConfigError(msg)
        if isinstance(raw, dict):
            raw = {"instruction": _WORD, "evaluator": {"name": ""}, **raw, "id": prefix}
        task = parse_task(raw, where, folder)
        if _WORD not in task.instruction:
            msg = f"{where}: instruction is {task.instruction!r:.80}, must have {_WORD} in it"
            raise ConfigError(msg)
        limits = values.get("limits") or {}
        return cls(task, frozenset({*values, *(f"limits.{name}" for name in limits)}))

    def make(  # noqa: PLR0913 - an instance's own
        self,
        instance: str,
        instruction: str,
        *,
        evaluator: PluginSpec | None = None,
        runtime: PluginSpec | None = None,
        workspace: Workspace | None = None,
        files: Mapping[str, str] | None = None,
        limits: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Task:
        """The task of an instance: its own words, and the template where that says something."""
        task = self.task
        own = {k: v for k, v in (limits or {}).items() if f"limits.{k}" not in self.given}
        return msgspec.structs.replace(
            task,
            id=task_id(task.id + instance),
            instruction=task.instruction.replace(_WORD, instruction),
            evaluator=self._judge(evaluator),
            runtime=self._place(runtime),
            workspace=workspace or Workspace(),
            files=dict(files or {}),
            limits=msgspec.convert(msgspec.structs.asdict(task.limits) | own, Limits),
            tags={**(tags or {}), **task.tags, INSTANCE: instance},
        )

    def _place(self, own: PluginSpec | None) -> PluginSpec:
        """The set's own runtime, or the template's with what the set says of that one."""
        if "runtime" not in self.given:
            return own or self.task.runtime
        return self.task.runtime if own is None else _placed(self.task.runtime, own)

    def _judge(self, own: PluginSpec | None) -> PluginSpec:
        """The set's own evaluator, also where the template's names it as a part of another."""
        if "evaluator" not in self.given:
            if own is None:
                msg = "the template has no evaluator, and this task set brings none"
                raise ConfigError(msg)
            return own
        return self.task.evaluator if own is None else _placed(self.task.evaluator, own)


def task_id(name: str) -> str:
    """`name` as an id: with a dash for what an id cannot hold. Raises `ConfigError`."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    if not 0 < len(plain) <= _LONGEST_ID:
        msg = f"instance {name!r}: must have 1 to {_LONGEST_ID} characters to be a task's id"
        raise ConfigError(msg)
    return plain


def _placed(part: PluginSpec, own: PluginSpec) -> PluginSpec:
    """`part` with the options of `own` wherever a part of its name stands in it."""
    filled = _filled(msgspec.to_builtins(part), own)
    return msgspec.convert(filled, PluginSpec)


def _filled(value: Any, own: PluginSpec) -> Any:
    if isinstance(value, list):
        return [_filled(one, own) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("name") == own.name and value.keys() <= {"name", "options"}:
        return {"name": own.name, "options": own.options | (value.get("options") or {})}
    return {key: _filled(one, own) for key, one in value.items()}
