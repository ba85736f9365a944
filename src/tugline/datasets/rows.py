"""Rows of a dataset, and a task set that makes a task from each row.

Rows are read one by one from a JSON, JSON lines, CSV or Parquet file or from the Hugging Face hub,
each with its location for error messages.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from tugline.datasets.base import SPLIT, Solution, TaskSet, TaskTemplate
from tugline.errors import ConfigError
from tugline.plugins import import_extra
from tugline.schema import read_jsonl, read_text, read_values
from tugline.types import INSTANCE, Task

_FIELD = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MAX_FIELD = 1 << 30
"""Maximum length of a CSV field; patches and lists of tests exceed the default of `csv`."""


@dataclass(eq=False)
class RowSource:
    """The source of rows: a file, or a dataset of the Hugging Face hub."""

    path: str | None = None
    dataset: str | None = None
    """Name on the hub, such as ``SWE-Gym/SWE-Gym``; needs the extra ``hub``."""
    subset: str | None = None
    """Configuration of `dataset`."""
    split: str | None = None
    """Split of `dataset`; None: all."""
    revision: str | None = None
    """Commit or tag of `dataset`."""

    def check(self, taskset: str) -> None:
        """Check that there is exactly one source. Raises `ConfigError`, naming the task set."""
        if (self.path is None) == (self.dataset is None):
            raise ConfigError(f"taskset {taskset!r}: give either path or dataset")
        if self.path is not None and Path(self.path).suffix.lower() not in SUFFIXES:
            msg = f"taskset {taskset!r}: path is {self.path!r}, must end in {', '.join(SUFFIXES)}"
            raise ConfigError(msg)

    def rows(self) -> Iterator[tuple[str, Row, str | None]]:
        """Yield the location of each row for messages, the row, and its split or None."""
        if self.path is not None:
            yield from ((where, row, None) for where, row in read_rows(Path(self.path)))
        else:
            yield from self._read_hub()

    def _read_hub(self) -> Iterator[tuple[str, Row, str | None]]:
        name = self.dataset or ""
        datasets = import_extra("datasets", "hub", f"dataset {name!r} of the Hugging Face hub")
        try:
            splits = datasets.load_dataset(name, self.subset, revision=self.revision)
        except (OSError, ValueError, RuntimeError) as error:
            msg = f"dataset {name!r} cannot be loaded: {str(error).splitlines()[0][:300]}"
            raise ConfigError(msg) from error
        if self.split is not None and self.split not in splits:
            msg = f"dataset {name!r}: split is {self.split!r}, must be one of {', '.join(splits)}"
            raise ConfigError(msg)
        for split in [self.split] if self.split is not None else list(splits):
            for number, row in enumerate(splits[split]):
                yield f"{name}, {split} row {number}", row, split


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the location of each row for messages, and the row. Raises `ConfigError`."""
    for where, row in _read_file(path):
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is not a row: expected an object with keys and values")
        yield where, row


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    match path.suffix.lower():
        case ".parquet":
            yield from _read_parquet(path)
        case ".json":
            values = read_values(path)
            if not isinstance(values, list):
                raise ConfigError(f"{path} must be a list of rows")
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(values))
        case ".csv":
            yield from _read_csv(path)
        case _:
            yield from read_jsonl(path)


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_MAX_FIELD)
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row:
                msg = f"{where}: the line has more values than the {len(row) - 1} names in line 1"
                raise ConfigError(msg)
            yield where, row
    except csv.Error as error:
        raise ConfigError(f"{path}, line {rows.line_num} is not valid CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    parquet = import_extra("pyarrow.parquet", "export", f"{path}, a Parquet file,")
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(256) for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


class JsonlTaskSet(TaskSet):
    """Task set that makes a task from each row; options name the fields.

        taskset:
          name: jsonl
          options:
            path: train.jsonl
            id: problem_id
            instruction: "Write the answer to answer.txt. {question}"
            evaluator: {answer: solution}

    `path` is a .jsonl, .json, .csv or .parquet file, `dataset` a name on the Hugging Face hub.

    `instruction` names a field, or is a text with fields in braces. `id` names a field; without it
    rows are numbered. `evaluator` maps options of the template's evaluator to fields. `files` and
    `solution` map paths to fields, or name one field that maps paths to texts. `tags` names fields.
    A dot selects a nested field: ``meta.level``.
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
        id: str | None = None,  # noqa: A002 - its name in the file
        evaluator: Mapping[str, str] | None = None,
        files: Mapping[str, str] | str | None = None,
        solution: Mapping[str, str] | str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._source = RowSource(path, dataset, subset, split, revision)
        self._source.check("jsonl")
        self._instruction = instruction
        self._id = id
        self._options = dict(evaluator or {})
        self._files, self._solution = files, solution
        self._tags = tuple(tags)

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Make a task from each row."""
        if "evaluator" not in template.given:
            raise ConfigError("template.evaluator is missing; rows can only set its options")
        for number, (where, row, split) in enumerate(self._source.rows()):
            tags = {tag: _to_text(row, tag, where) for tag in self._tags}
            task = template.make(
                self._find_name(row, number, where),
                self._make_instruction(row, where),
                files=_to_files(self._files, row, where),
                tags={SPLIT: split, **tags} if split else tags,
            )
            yield self._set_evaluator(task, row, where)

    def solution(self, task: Task) -> Solution | None:
        """Return the files that the option `solution` names; None without that option."""
        if self._solution is None:
            return None
        return Solution(changes=self._solutions[task.tags[INSTANCE]])

    @cached_property
    def _solutions(self) -> dict[str, dict[str, str]]:
        """Files of each solution by instance."""
        return {
            self._find_name(row, number, where): _to_files(self._solution, row, where)
            for number, (where, row, _) in enumerate(self._source.rows())
        }

    def _find_name(self, row: Row, number: int, where: str) -> str:
        return str(number) if self._id is None else _to_text(row, self._id, where)

    def _make_instruction(self, row: Row, where: str) -> str:
        if _FIELD.search(self._instruction):
            return _FIELD.sub(lambda match: _to_text(row, match[1], where), self._instruction)
        instruction = _to_text(row, self._instruction, where)
        if not instruction.strip():
            raise ConfigError(
                f"{where}: {self._instruction} is {instruction!r}, must be a non-empty text"
            )
        return instruction

    def _set_evaluator(self, task: Task, row: Row, where: str) -> Task:
        own = {option: _find_field(row, field, where) for option, field in self._options.items()}
        options = {**task.evaluator.options, **own}
        evaluator = msgspec.structs.replace(task.evaluator, options=options)
        return msgspec.structs.replace(task, evaluator=evaluator)


def _find_field(row: Row, name: str, where: str) -> Any:
    """Return a field's value; a dot selects a nested field. Raises `ConfigError`."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(f"{where}: unknown field {name!r} (known: {', '.join(row)})")
        value = value[part]
    return value


def _to_text(row: Row, name: str, where: str) -> str:
    """Return a field as text. Raises `ConfigError` if it has no value."""
    value = _find_field(row, name, where)
    if value is None:
        raise ConfigError(f"{where}: {name} is null, must be a text")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _to_files(given: Mapping[str, str] | str | None, row: Row, where: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, str):
        return {path: _to_text(row, field, where) for path, field in given.items()}
    value = _find_field(row, given, where)
    if isinstance(value, str):  # Parquet lacks maps of arbitrary keys: stored as JSON
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ConfigError(f"{where}: {given} must be an object that maps paths to texts")
    return value
