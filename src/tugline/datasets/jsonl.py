"""Tasks from rows of any shape: options say which field is what.

    taskset:
      name: jsonl
      options:
        path: train.jsonl
        id: problem_id
        instruction: "Write the answer to answer.txt. {question}"
        evaluator: {answer: solution}

The evaluator itself is the template's; a row only fills options of it. A field may be inside
another one: ``meta.level``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tugline.datasets.base import INSTANCE, SPLIT, Solution, TaskSet, Template
from tugline.datasets.rows import Row, Source
from tugline.errors import ConfigError
from tugline.types import Task

_FIELD = re.compile(r"\{([A-Za-z_][\w.-]*)\}")


class JsonlTaskSet(TaskSet):
    """`path` is a .jsonl, .json, .csv or .parquet file, `dataset` one of the Hugging Face hub.

    `instruction` is a field, or a text with fields in braces. `id` is a field; without it rows are
    numbered. `evaluator` gives options of the template's evaluator by field; `files` and
    `solution` give files by field, or name one field that holds them by path; `tags` names fields.
    """

    def __init__(  # noqa: PLR0913 - each is an option
        self,
        *,
        path: str | None = None,
        dataset: str | None = None,
        subset: str | None = None,
        split: str | None = None,
        revision: str | None = None,
        instruction: str = "instruction",
        id: str | None = None,  # noqa: A002 - what it is called in the file
        evaluator: Mapping[str, str] | None = None,
        files: Mapping[str, str] | str | None = None,
        solution: Mapping[str, str] | str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._source = Source(path, dataset, subset, split, revision)
        self._source.check("jsonl")
        self._instruction = instruction
        self._id = id
        self._options = dict(evaluator or {})
        self._files, self._solution = files, solution
        self._tags = tuple(tags)
        self._solved: dict[str, dict[str, str]] | None = None
        """Files of solutions by instance, once one was asked for."""

    def tasks(self, template: Template) -> Iterator[Task]:
        """A task for each row."""
        if "evaluator" not in template.given:
            msg = "template.evaluator is missing: rows say what is right, not who judges"
            raise ConfigError(msg)
        for number, (where, row, split) in enumerate(self._source.rows()):
            tags = {tag: _text(row, tag, where) for tag in self._tags}
            task = template.make(
                self._name(row, number, where),
                self._told(row, where),
                files=_files(self._files, row, where),
                tags={SPLIT: split, **tags} if split else tags,
            )
            yield self._judged(task, row, where)

    def solution(self, task: Task) -> Solution | None:
        """The files that `solution` names; None without that option."""
        if self._solution is None:
            return None
        if self._solved is None:
            self._solved = {
                self._name(row, number, where): _files(self._solution, row, where)
                for number, (where, row, _) in enumerate(self._source.rows())
            }
        return Solution(changes=self._solved[task.tags[INSTANCE]])

    def _name(self, row: Row, number: int, where: str) -> str:
        return str(number) if self._id is None else _text(row, self._id, where)

    def _told(self, row: Row, where: str) -> str:
        if _FIELD.search(self._instruction):
            return _FIELD.sub(lambda hit: _text(row, hit[1], where), self._instruction)
        told = _text(row, self._instruction, where)
        if not told.strip():
            msg = f"{where}: {self._instruction} is {told!r}, must be a text"
            raise ConfigError(msg)
        return told

    def _judged(self, task: Task, row: Row, where: str) -> Task:
        own = {option: _field(row, field, where) for option, field in self._options.items()}
        judge = task.evaluator
        judge = msgspec.structs.replace(judge, options={**judge.options, **own})
        return msgspec.structs.replace(task, evaluator=judge)


def _field(row: Row, name: str, where: str) -> Any:
    """A field's value; a dot leads into a field. Raises `ConfigError`."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            msg = f"{where}: there is no field {name!r} (known: {', '.join(row)})"
            raise ConfigError(msg)
        value = value[part]
    return value


def _text(row: Row, name: str, where: str) -> str:
    """A field as text. Raises `ConfigError` for one without a value."""
    value = _field(row, name, where)
    if value is None:
        msg = f"{where}: {name} has no value, must be a text"
        raise ConfigError(msg)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _files(given: Mapping[str, str] | str | None, row: Row, where: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, str):
        return {path: _text(row, field, where) for path, field in given.items()}
    value = _field(row, given, where)
    if isinstance(value, str):  # Parquet has no maps of any keys: they are JSON there
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        msg = f"{where}: {given} must be an object of text by path"
        raise ConfigError(msg)
    return value
