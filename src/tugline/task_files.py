"""Task files: YAML, TOML, JSON or JSON lines, read strictly.

A file holds one task or a list of them (in TOML: ``[[tasks]]``). Long texts may be in other files:
``instruction_file: PATH`` for `instruction`, and ``{file: PATH}`` for the text of one of `files`.
All paths are relative to the task file: those of a workspace, and words of the command of the
harness `shell`, if they exist there. A plug-in without
options may be given by its name alone: ``harness: pi``. Every error names the file, the task, the
field, its value and the expected value.

The commented template is made from the fields of `types.Task` and their docstrings, so it matches
the parser.
"""

import glob
import os
import posixpath
import re
import reprlib
import shlex
from collections.abc import Callable, Iterator
from enum import EnumType
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tugline.errors import ConfigError, UsageError
from tugline.schema import FILE_TYPES, decode, field_docs, list_structs, read_jsonl, read_values
from tugline.types import PluginSpec, Task
from tugline.types.task import SERVER_FIELDS

SUFFIXES = (*FILE_TYPES, ".jsonl")
INSTRUCTION_FILE = "instruction_file"
PLUGINS = tuple(each.name for each in msgspec.structs.fields(Task) if each.type is PluginSpec)
SHELL = "shell"
"""Harness that runs a command of the user."""
_COMMANDS = ("command", "setup")
"""Options of `SHELL` whose words may be paths."""
_PATHS = ("folder", "build", "repo")
"""Fields of a workspace that may be paths."""
_EXAMPLE = (Path(__file__).parent / "task_template.yaml").read_text(encoding="utf-8")
"""Example of a task file; placeholders in its comments name fields of `Task`."""


def read_tasks(path: Path) -> Iterator[tuple[str, Task]]:
    """Read the tasks of one file, each with its source for messages.

    Raises one `ConfigError` after the last task, with the mistakes of all.
    """
    problems: list[ConfigError] = []
    try:
        for source, values in _read_entries(path):
            try:
                yield source, parse_task(values, source, path.parent)
            except ConfigError as error:
                problems.append(error)
    except ConfigError as error:  # a line is not JSON
        problems.append(error)
    if problems:
        raise ConfigError.combine(problems)


def find_files(given: Path | str) -> list[Path]:
    """List the task files of a path, folder or pattern. Raises `UsageError` if there is none."""
    path = Path(given)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        missing = f"{path} contains no task files ({', '.join(SUFFIXES)})"
    elif path.exists():
        return [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(given), recursive=True))  # noqa: PTH207 - patterns may be absolute
        missing = f"{given} does not exist, and matches no files"
    if not files:
        raise UsageError(missing)
    return files


def _read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the source and the undecoded values of each task."""
    if path.suffix.lower() == ".jsonl":
        yield from read_jsonl(path)
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

    Raises one `ConfigError` with all mistakes.
    """
    problems: list[ConfigError] = []
    if not isinstance(values, dict):
        msg = (
            f"{source}: {reprlib.repr(values)} is not a task: expected a mapping such as `id: "
            "fix-add`"
        )
        raise ConfigError(msg)
    named = {kind: {"name": values[kind]} for kind in PLUGINS if isinstance(values.get(kind), str)}
    values = values | named
    if isinstance(values.get("workspace"), dict):
        values["workspace"] = {
            name: str((folder / path).absolute())
            if name in _PATHS and isinstance(path, str) and (folder / path).exists()
            else path
            for name, path in values["workspace"].items()
        }
    if isinstance(values.get("harness"), dict):
        values["harness"] = _locate_agent(values["harness"], folder, values.get("files"))
    if INSTRUCTION_FILE in values:
        if "instruction" in values:
            problems.append(
                ConfigError(f"instruction and {INSTRUCTION_FILE} are both given; keep one of them")
            )
        name = values.pop(INSTRUCTION_FILE)
        values["instruction"] = _read_referenced(folder, name, INSTRUCTION_FILE, problems)
    if isinstance(values.get("files"), dict):
        values["files"] = {
            name: _read_referenced(folder, text["file"], f"files.{name}.file", problems)
            if isinstance(text, dict) and list(text) == ["file"]
            else text
            for name, text in values["files"].items()
        }
    try:
        task = decode(values, Task)
    except ConfigError as error:
        problems.append(error)
    if problems:
        raise ConfigError.combine(problems, source)
    return task


def _locate_agent(harness: dict[str, Any], folder: Path, files: Any) -> dict[str, Any]:
    """Make the paths of a command beside the task file absolute, except those of task files."""
    options = harness.get("options")
    if harness.get("name") != SHELL or not isinstance(options, dict):
        return harness
    own = files if isinstance(files, dict) else {}

    def locate(word: Any, exists: Callable[[str], bool]) -> Any:
        if not isinstance(word, str) or not word.strip() or posixpath.normpath(word) in own:
            return word
        path = str((folder / word).absolute())
        return path if exists(path) else word

    located = dict(options)
    for name in _COMMANDS:
        command = options.get(name)
        if isinstance(command, str):
            words = re.split(r"(\s+)", command)
            found = [(word, locate(word, os.path.isfile)) for word in words]
            located[name] = "".join(w if p == w else shlex.quote(p) for w, p in found)
        elif isinstance(command, list):
            located[name] = [locate(word, os.path.isfile) for word in command]
    if isinstance(options.get("folders"), list):
        located["folders"] = [locate(word, os.path.isdir) for word in options["folders"]]
    return harness | {"options": located}


def _read_referenced(folder: Path, name: Any, field: str, problems: list[ConfigError]) -> str:
    """Return the text of a file; if it cannot be read, add a problem and return no text."""
    try:
        path: Path = folder / name
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(ConfigError(f"{field} is {name!r}, which cannot be read: {reason}", field))
        return ""


# --------------------------------------------------------------------------- the template
def make_template() -> str:
    """Return a task file with all fields and descriptions: required ones, then defaults."""
    start = _EXAMPLE.format_map(field_docs(Task))
    return start + "\n".join(["", *_optional()]) + "\n"


def _optional() -> Iterator[str]:
    docs = field_docs(Task)
    for field in msgspec.structs.fields(Task):
        if f"\n{field.name}:" in f"\n{_EXAMPLE}" or field.name in SERVER_FIELDS:
            continue
        yield f"# {docs[field.name]}{_choices(field.type)}"
        inner = list_structs(field.type)
        if not inner:
            yield f"# {field.name}: {_to_yaml(_default(field))}"
            continue
        yield f"# {field.name}:"
        for kind in inner:
            for part in msgspec.structs.fields(kind):
                default = getattr(field.default, part.name, _default(part))
                text = f"{field_docs(kind)[part.name]}{_choices(part.type)}"
                yield f"#   {part.name}: {_to_yaml(default)}  # {text}"


def _choices(annotation: Any) -> str:
    return f" One of {', '.join(annotation)}." if isinstance(annotation, EnumType) else ""


def _default(field: msgspec.structs.FieldInfo) -> object:
    make = field.default_factory
    return field.default if make is msgspec.NODEFAULT else make()


def _to_yaml(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return '"..."'
    text: str = yaml.safe_dump(msgspec.to_builtins(default), default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
