"""The commands and files of the documentation are accepted by the program.

Command lines are parsed, tasks and configurations decoded. The first steps are run and their output
is compared; test_tutorial.py runs a whole page.
"""

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cyclopts import CycloptsError, MissingArgumentError

from support.commands import run_command
from tugline.cli.app import COMMANDS, make_app
from tugline.datasets.base import TaskTemplate
from tugline.datasets.files import SetFile
from tugline.demo.run import DemoSettings
from tugline.errors import ConfigError
from tugline.launch.settings import Settings
from tugline.plugins import BUILT_IN, find
from tugline.schema import _parse_yaml, decode, list_structs
from tugline.task_files import parse_task
from tugline.trainers.config import TrainConfig
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.sft import SftRunConfig
from tugline.types import PluginSpec, Task
from tugline.types.task import SERVER_FIELDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*"),
    ]
    if path.suffix in {".md", ".py", ".yaml"} and "tasks" not in path.relative_to(ROOT).parts
)
_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "..."}
_FILES = (Settings, TrainConfig, SftRunConfig, DemoSettings, GrpoConfig, SetFile)
_OTHERS = {"scrape_configs", "x-tests"}
"""First keys of files of other programs."""


def list_commands(text: str) -> Iterator[str]:
    """Command lines in blocks (in `console` blocks those after a `$`), and in indented lines."""
    text = text.replace("\\\n", " ")
    for kind, block in _BLOCK.findall(text):
        prompt = {"console": r"\$ ", "sh": ""}.get(kind)
        if prompt is not None:
            yield from re.findall(rf"^{prompt}((?:\w+=\S+ )*tugline .*)", block, re.MULTILINE)
    yield from re.findall(r"^(?:#|    )? *\$? ?(tugline .*)", _BLOCK.sub("", text), re.MULTILINE)


def split(line: str) -> list[str]:
    """Arguments of the command, without the shell's syntax."""
    arguments = shlex.split(line, comments=True)
    arguments = arguments[arguments.index("tugline") + 1 :]
    ends = [number for number, argument in enumerate(arguments) if argument in _ENDS]
    return arguments[: ends[0]] if ends else arguments


def find_mistake(line: str, *, whole: bool) -> str:
    """The program's error for a line; with `whole`, also for missing arguments."""
    arguments = split(line)
    if not arguments or arguments[0].startswith("-"):
        return "" if arguments in (["--version"], ["--help"], ["-h"]) else "no command"
    if arguments[0] not in COMMANDS:
        return "no such command"
    whole = whole and "..." not in line
    try:
        make_app().parse_args(arguments, exit_on_error=False, print_error=False)
    except MissingArgumentError as error:
        return str(error) if whole else ""
    except CycloptsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_accepted(page: Path) -> None:
    """Command, options and number of arguments of each command line of a page are valid."""
    text = page.read_text(encoding="utf-8")
    mistakes = {
        line: mistake for line in list_commands(text) if (mistake := find_mistake(line, whole=True))
    }
    spans = re.findall(r"`(tugline [^`|\n]+)`", _BLOCK.sub("", text))
    mistakes |= {line: mistake for line in spans if (mistake := find_mistake(line, whole=False))}
    assert not mistakes


def test_the_pages_have_commands() -> None:
    """The patterns match, and a wrong line is refused."""
    commands = [line for page in PAGES for line in list_commands(page.read_text(encoding="utf-8"))]
    assert len(commands) > 60
    assert find_mistake("tugline run --harness shell t.yaml --out o", whole=True)
    assert find_mistake("tugline status a b c", whole=True)
    assert not find_mistake("X=1 tugline status a --json | jq # it", whole=True)


def test_the_first_task_file_is_well_formed(tmp_path: Path) -> None:
    """The commands of the first block of docs/tasks.md have the output shown there."""
    kind, block = _BLOCK.findall((ROOT / "docs" / "tasks.md").read_text(encoding="utf-8"))[0]
    assert kind == "console"
    for step in block.removeprefix("$ ").split("\n$ "):
        command, _, output = step.partition("\n")
        done = run_command(*split(command), cwd=tmp_path)
        assert done.returncode == 0
        assert (done.stdout + done.stderr).strip() == output.strip()


# --------------------------------------------------------------------------- files
def list_files(page: Path) -> Iterator[Any]:
    """Decoded YAML of a file, or of the blocks of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = [("yaml", text)] if page.suffix == ".yaml" else _BLOCK.findall(text)
    for kind, block in blocks:
        values = _parse_yaml(block, "block") if kind == "yaml" else None
        if isinstance(values, dict) and not _OTHERS & {*values}:
            yield values


def explain(values: dict[str, Any], folder: Path) -> str:
    """The mistakes of `values` as a file, or the start of one, of the best matching kind."""
    mistakes = []
    for kind in _FILES:
        try:
            decode(values, kind)
        except ConfigError as error:
            mistakes.append(str(error))
        else:
            return ""
    try:
        parse_task(values, "task", folder)
    except ConfigError as error:
        mistakes.append(str(error))
    known = [each for each in mistakes if "unknown key" not in each]
    if any(each.endswith((" is missing", "No such file or directory")) for each in known):
        return ""  # a part of a file, or a file that needs others
    return " / ".join(known or mistakes)


def list_options(values: Any) -> Iterator[tuple[str, str, set[str]]]:
    """Kind, name and options of every plug-in in `values`."""
    if isinstance(values, list):
        for each in values:
            yield from list_options(each)
    if isinstance(values, dict):
        for key, each in values.items():
            if key in BUILT_IN and isinstance(each, dict) and "name" in each:
                yield key, each["name"], {*each.get("options", {})}
            yield from list_options(each)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_are_accepted(page: Path) -> None:
    """Keys of tasks, task sets and configurations exist, and so do options of plug-ins."""
    for values in list_files(page):
        assert not explain(values, page.parent), values
        if "template" in values:
            TaskTemplate.read(values["template"], "template", page.parent)
        for kind, name, options in list_options(values):
            parameters = {} if ":" in name else inspect.signature(find(kind, name)).parameters
            if parameters and "bounds" not in parameters:
                assert options <= {*parameters}, name


def test_every_key_of_a_task_is_documented() -> None:
    """docs/configuration.md has each field of a task and, with a dot, each nested field."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = []
    for field in msgspec.structs.fields(Task):
        if field.name in SERVER_FIELDS:
            continue
        inner = [each for each in list_structs(field.type) if each is not PluginSpec]
        names = [f".{own.name}" for each in inner for own in msgspec.structs.fields(each)]
        keys += [field.name + name for name in names or [""]]
    assert len(keys) > 30
    assert [key for key in keys if f"`{key}`" not in page] == []
