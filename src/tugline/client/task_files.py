"""Tasks from files: YAML, TOML, JSON or JSON lines, read strictly.

A file holds one task or a list of them (in TOML: ``[[tasks]]``). Long texts may lie beside it:
``instruction_file: PATH`` for `instruction`, and ``{file: PATH}`` for the text of one of `files`;
both paths are relative to the task file. An unknown key is an error that names the nearest known
one, and every error names the file, the task, the field, its value and what would be right.
"""

from __future__ import annotations

import difflib
import glob
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import yaml

from tugline.errors import ConfigError, UsageError
from tugline.types import Task

SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".jsonl")
INSTRUCTION = "instruction_file"
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_S = TypeVar("_S", bound=msgspec.Struct)


def load_tasks(paths: Iterable[Path | str]) -> list[Task]:
    """The tasks in files, in folders of files (not below them), and behind glob patterns.

    Raises `ConfigError` for what is wrong in a file, `UsageError` where there is none.
    """
    tasks: list[Task] = []
    homes: dict[str, str] = {}
    for path in paths:
        for file in task_files(path):
            for where, task in read_tasks(file):
                if task.id in homes:
                    msg = f"{where}: id {task.id!r} is taken, by {homes[task.id]}"
                    raise ConfigError(msg)
                homes[task.id] = where
                tasks.append(task)
    return tasks


def read_tasks(path: Path) -> Iterator[tuple[str, Task]]:
    """The tasks of one file, each with its place in words. Raises `ConfigError`."""
    for where, raw in _parsed(path, read_text(path)):
        yield where, to_task(raw, where, path.parent)


def read_text(path: Path) -> str:
    """The text of a file. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}"
        raise ConfigError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{path} is not UTF-8 text (byte {error.start})"
        raise ConfigError(msg) from error


def read_value(path: Path) -> Any:
    """What a YAML, TOML or JSON file holds. Raises `ConfigError`."""
    return _whole(path, read_text(path))


def task_files(given: Path | str) -> list[Path]:
    """The files that a path or pattern stands for. Raises `UsageError` where there is none."""
    path = Path(given)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        missing = f"there is no task file ({', '.join(SUFFIXES)}) in {path}"
    elif path.exists():
        return [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(given), recursive=True))  # noqa: PTH207 - patterns may be absolute
        missing = f"there is no file {given}"
    if not found:
        raise UsageError(missing)
    return found


# --------------------------------------------------------------------------- text to values
class _Strict(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                msg = f"key {key.value!r} stands twice"
                raise yaml.MarkedYAMLError(problem=msg, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep=deep)


def _parsed(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each task's values, and where they stand."""
    if path.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _json(line, where)
        return
    values = _whole(path, text)
    if isinstance(values, dict) and list(values) == ["tasks"]:
        values = values["tasks"]
    if isinstance(values, list):
        yield from ((f"{path}, task {number}", one) for number, one in enumerate(values, 1))
    else:
        yield str(path), values


def _whole(path: Path, text: str) -> Any:
    match path.suffix.lower():
        case ".json":
            return _json(text, str(path))
        case ".toml":
            try:
                return tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                msg = f"{path} is not valid TOML: {error}"
                raise ConfigError(msg) from error
        case ".yaml" | ".yml":
            try:
                return yaml.load(text, _Strict)  # noqa: S506 - a SafeLoader
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
                msg = f"{path} is not valid YAML: {getattr(error, 'problem', error)}{at}"
                raise ConfigError(msg) from error
    msg = f"{path}: file type {path.suffix!r} is unknown; use one of {', '.join(SUFFIXES)}"
    raise ConfigError(msg)


def _json(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}"
        raise ConfigError(msg) from error


# --------------------------------------------------------------------------- values to a task
def to_task(raw: Any, where: str, folder: Path) -> Task:
    """A task from its keys and values; files beside it are in `folder`. Raises `ConfigError`."""
    if not isinstance(raw, dict):
        msg = f"{where}: {reprlib.repr(raw)} is no task; keys and values are needed, key: value"
        raise ConfigError(msg)
    values = dict(raw)
    if INSTRUCTION in values:
        if "instruction" in values:
            msg = f"{where}: give either instruction or {INSTRUCTION}"
            raise ConfigError(msg)
        values["instruction"] = _beside(folder, values.pop(INSTRUCTION), where, INSTRUCTION)
    if isinstance(values.get("files"), dict):
        values["files"] = {
            name: _beside(folder, text["file"], where, f"files.{name}.file")
            if isinstance(text, dict) and list(text) == ["file"]
            else text
            for name, text in values["files"].items()
        }
    return converted(values, Task, where)


def converted(values: Any, kind: type[_S], where: str) -> _S:
    """`values` as a struct of this kind. Raises `ConfigError` for what is unknown or wrong."""
    _refuse_unknown(values, kind, where, "")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explained(error, values, kind, where) from error


def _beside(folder: Path, name: Any, where: str, field: str) -> str:
    try:
        path: Path = folder / name
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        msg = f"{where}: {field} is {name!r}, which cannot be read: {why}"
        raise ConfigError(msg) from error


def _refuse_unknown(values: Any, kind: type[msgspec.Struct], where: str, at: str) -> None:
    if not isinstance(values, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(fields)}"
            msg = f"{where}: unknown key {f'{at}{name}'!r}; {hint}"
            raise ConfigError(msg)
        for inner in struct_in(fields[name]):
            _refuse_unknown(value, inner, where, f"{at}{name}.")


def struct_in(annotation: Any) -> list[type[msgspec.Struct]]:
    """The struct that a field holds, such as that of ``Callback | None``; none for plain values."""
    kinds = [annotation, *get_args(annotation)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def _explained(error: msgspec.ValidationError, values: Any, kind: Any, where: str) -> ConfigError:
    """`error` with the field, its value and what is known of it."""
    why, _, place = str(error).replace("[...]", "").partition(" - at `")
    why = why.replace("`", "")
    lacking = re.search(r"missing required field (\w+)", why)
    path = [name or int(number) for name, number in _STEP.findall(place.removesuffix("`"))]
    if lacking:
        return ConfigError(f"{where}: {'.'.join(map(str, [*path, lacking[1]]))} is missing")
    for step in path:
        values = values[step]
        within = [one for inner in struct_in(kind) for one in msgspec.structs.fields(inner)]
        kind = next((one.type for one in within if one.name == step), None)
    if isinstance(kind, EnumType):
        why = f"must be one of {', '.join(kind)}"
    return ConfigError(f"{where}: {'.'.join(map(str, path))} is {reprlib.repr(values)}: {why}")
