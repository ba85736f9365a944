"""Interface of task sets, which convert the instances of a benchmark to tasks.

The instruction, workspace and evaluator of an instance come from the set; harness, runtime,
samples and limits come from a `TaskTemplate`, the same for all tasks of a run. If both have a
value, the template's is used.

A set may have reference solutions (`solution`), to validate tasks before a model is trained on
them: the solution must earn 1, and an unchanged workspace less.
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
from tugline.types import INSTANCE, Limits, PluginSpec, Task, Workspace

SPLIT = "split"
"""The tag with the split of an instance."""
TASKSET = "taskset"
"""The tag with the name of the set."""

_OF_INSTANCE = frozenset({"id", "files", "workspace"})
_PLACEHOLDER = "{instruction}"
_MAX_ID = 128


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """A reference solution: files to write and a program to run."""

    changes: Mapping[str, Content] = {}
    """Files to change in the workdir."""
    home: Mapping[str, Content] = {}
    """Files to put into the agent's home, for `argv`."""
    argv: tuple[str, ...] = ()
    """Program to run in the workdir after that; it must exit with 0. Empty: no program."""
    env: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    """Folders mounted for the solution only."""


class TaskSet(ABC):
    """A set of tasks. Its option `path`, if it has one, is given as an absolute path."""

    @abstractmethod
    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Yield the tasks in the order of the source.

        Raises `ConfigError`, which names the file, the instance, the field and its value.
        """

    def solution(self, task: Task) -> Solution | None:
        """Return the reference solution of a task of this set; None if there is none."""
        return None


class TaskTemplate(msgspec.Struct, frozen=True):
    """Settings shared by all tasks of a run."""

    task: Task
    """Task with the shared fields; its `id` is the prefix of each task's id."""
    given: frozenset[str]
    """Fields set in the file, such as ``runtime`` and ``limits.agent_s``; others have defaults."""

    @classmethod
    def read(cls, values: Any, where: str, folder: Path, *, prefix: str = "") -> TaskTemplate:
        """Read the values of a task file without the fields of an instance.

        Raises `ConfigError`.
        """
        raw = values
        if isinstance(values, dict):
            for name in sorted(_OF_INSTANCE & values.keys()):
                msg = f"{where}: {name} is set for each instance; leave it out of the template"
                raise ConfigError(msg)
            own = {"instruction": _PLACEHOLDER, "evaluator": {"name": "of the set"}}
            raw = {**own, **values, "id": "template"}
        task = msgspec.structs.replace(parse_task(raw, where, folder), id=prefix)
        if _PLACEHOLDER not in task.instruction:
            msg = f"{where}: instruction is {task.instruction!r:.80}, must contain {_PLACEHOLDER}"
            raise ConfigError(msg)
        limits = values.get("limits") or {}
        return cls(task, frozenset({*values, *(f"limits.{name}" for name in limits)}))

    def make(  # noqa: PLR0913 - fields of an instance
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
        """Make the task of an instance; values of the template take precedence."""
        task = self.task
        if evaluator is None and "evaluator" not in self.given:
            raise ConfigError(
                "template.evaluator is missing, and this task set does not provide one"
            )
        own = {k: v for k, v in (limits or {}).items() if f"limits.{k}" not in self.given}
        return msgspec.structs.replace(
            task,
            id=task_id(task.id + instance),
            instruction=task.instruction.replace(_PLACEHOLDER, instruction),
            evaluator=self._select("evaluator", evaluator),
            runtime=self._select("runtime", runtime),
            workspace=workspace or Workspace(),
            files=dict(files or {}),
            limits=msgspec.convert(msgspec.structs.asdict(task.limits) | own, Limits),
            tags={**(tags or {}), **task.tags, INSTANCE: instance},
        )

    def _select(self, field: str, own: PluginSpec | None) -> PluginSpec:
        """Return the template's plug-in with the set's options for it, or else the set's."""
        given: PluginSpec = getattr(self.task, field)
        if field not in self.given:
            return own or given
        if own is None:
            return given
        return msgspec.convert(_add_options(msgspec.to_builtins(given), own), PluginSpec)


def task_id(name: str) -> str:
    """Return `name` as an id, with dashes for other characters. Raises `ConfigError`."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    if not 0 < len(plain) <= _MAX_ID:
        msg = (
            f"instance is {name!r}, must have 1 to {_MAX_ID} characters, because it becomes a "
            "task's id"
        )
        raise ConfigError(msg)
    return plain


def _add_options(value: Any, own: PluginSpec) -> Any:
    """Add the options of `own` to every plug-in of its name in `value`."""
    if isinstance(value, list):
        return [_add_options(item, own) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("name") == own.name and value.keys() <= {"name", "options"}:
        return {"name": own.name, "options": own.options | (value.get("options") or {})}
    return {key: _add_options(item, own) for key, item in value.items()}
