"""Tasks from files: YAML, TOML, JSON or JSON lines, read strictly.

A file holds one task or a list of them (in TOML: ``[[tasks]]``). Long texts may be kept beside it:
``instruction_file: PATH`` for `instruction`, and ``{file: PATH}`` for the text of one of `files`;
both paths are relative to the task file. Every error names the file, the task, the field, its
value and what would be right.
"""

import glob
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tugline.errors import ConfigError, UsageError
from tugline.schema import FILE_TYPES, decode, parse_json, read_text, read_values
from tugline.types import Task

SUFFIXES = (*FILE_TYPES, ".jsonl")
INSTRUCTION_FILE = "instruction_file"


def read_tasks(path: Path) -> Iterator[tuple[str, Task]]:
    """Read the tasks of one file, each with its source for messages. Raises `ConfigError`."""
    for source, values in _read_entries(path):
        yield source, parse_task(values, source, path.parent)


def find_files(given: Path | str) -> list[Path]:
    """List the task files of a path, folder or pattern. Raises `UsageError` if there is none."""
    path = Path(given)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        missing = f"there is no task file ({', '.join(SUFFIXES)}) in {path}"
    elif path.exists():
        return [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(given), recursive=True))  # noqa: PTH207 - patterns may be absolute
        missing = f"there is no file {given}"
    if not files:
        raise UsageError(missing)
    return files


def _read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each task's undecoded values with its source."""
    if path.suffix.lower() == ".jsonl":
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                source = f"{path}, line {number}"
                yield source, parse_json(line, source)
        return
    values = read_values(path)
    if isinstance(values, dict) and list(values) == ["tasks"]:
        values = values["tasks"]
    if isinstance(values, list):
        for number, entry in enumerate(values, 1):
            yield f"{path}, task {number}", entry
    else:
        yield str(path), values


def parse_task(values: Any, source: str, folder: Path) -> Task:
    """Decode a task from its keys and values; referenced files are relative to `folder`.

    Raises `ConfigError`.
    """
    if not isinstance(values, dict):
        msg = f"{source}: {reprlib.repr(values)} is no task; keys and values are needed, key: value"
        raise ConfigError(msg)
    values = dict(values)
    if INSTRUCTION_FILE in values:
        if "instruction" in values:
            msg = f"{source}: give either instruction or {INSTRUCTION_FILE}"
            raise ConfigError(msg)
        name = values.pop(INSTRUCTION_FILE)
        values["instruction"] = _read_referenced(folder, name, f"{source}: {INSTRUCTION_FILE}")
    if isinstance(values.get("files"), dict):
        values["files"] = {
            name: _read_referenced(folder, text["file"], f"{source}: files.{name}.file")
            if isinstance(text, dict) and list(text) == ["file"]
            else text
            for name, text in values["files"].items()
        }
    return decode(values, Task, source=source)


def _read_referenced(folder: Path, name: Any, field: str) -> str:
    try:
        path: Path = folder / name
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        msg = f"{field} is {name!r}, which cannot be read: {reason}"
        raise ConfigError(msg) from error
