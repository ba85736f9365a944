"""Mistakes of a task that would else be found by its first session, and notes on this machine.

A mistake is wrong on every machine. A note may be right elsewhere: a program that is not installed
here, or a runtime that this machine cannot use.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from tugline.errors import Invalid
from tugline.rollout.parts import Parts
from tugline.sandbox.base import Runtime
from tugline.sandbox.view import search_path
from tugline.task_files import SHELL
from tugline.types import Task

_HOST_RUNTIMES = frozenset({"auto", "bubblewrap", "local"})
"""Runtimes whose programs are those of the machine."""
_INTERPRETER = re.compile(r"(python[\d.]*|node|bash|sh|ruby|perl|deno|bun)")
_SCRIPT = re.compile(r"\.(py|js|mjs|cjs|ts|sh|rb|pl)")
_ENDS = re.compile(r"[;&|\n<>]")
"""Characters that end the first simple command of a shell."""
_SHELL_WORDS = frozenset(
    (  # noqa: SIM905 - a list of words
        "cd export set unset if for while until case exec source . { ( ! test [ [[ eval trap "
        "umask ulimit printf echo true false read wait time command function alias"
    ).split()
)
"""First words that a shell understands itself, or that another command follows."""
_ASSIGNMENT = re.compile(r"\w+=")


def find_mistakes(task: Task) -> Iterator[Invalid]:
    """Yield what is wrong with the paths of a task's workspace and of its agent's command."""
    for name, other in (("build", "an absolute path"), ("repo", "a URL, an absolute path")):
        path = getattr(task.workspace, name)
        if path is not None and ":" not in path and not Path(path).is_absolute():
            must = f"{other}, or in a task file the path of a folder beside it"
            field = f"workspace.{name}"
            yield Invalid(f"{field} is {path!r}, must be {must}", field=field)
    for field, arguments in _list_commands(task):
        for word in _list_paths(arguments):
            if reason := _refuse_path(word, task):
                yield Invalid(f"{field} names {word!r}, {reason}", field=field)


Reasons = dict[Runtime, str | None]
"""Why runtimes cannot be used here, so that each is tried once."""


def find_notes(task: Task, parts: Parts, reasons: Reasons) -> Iterator[str]:
    """Yield what would not work on this machine, and limits that cut others short. May block."""
    runtime = task.runtime.name
    used = parts.runtime(task.runtime)
    if used not in reasons:
        reasons[used] = used.check_available()
    if reason := reasons[used]:
        yield f"runtime {runtime!r} cannot be used here: {reason}"
    if reason := parts.evaluator(task.evaluator).check_available():
        yield f"evaluator {task.evaluator.name!r} cannot be used here: {reason}"
    if runtime in _HOST_RUNTIMES:
        path = None if runtime == "local" else search_path()
        for field, arguments in _list_commands(task):
            if "/" not in arguments[0] and shutil.which(arguments[0], path=path) is None:
                yield f"{field} starts {arguments[0]!r}, which is not installed here"
    for name in ("folder", "build", "repo"):
        source = getattr(task.workspace, name)
        if source is not None and Path(source).is_absolute() and not Path(source).exists():
            yield f"workspace.{name} is {source!r}, which does not exist here"
    yield from _find_limits(task)


def _find_limits(task: Task) -> Iterator[str]:
    """Yield limits that cut others short."""
    limits = task.limits
    if limits.total_s is not None and limits.total_s <= limits.agent_s:
        yield (
            f"limits.total_s is {limits.total_s:g}, not above limits.agent_s, {limits.agent_s:g}:"
            " a slow agent leaves no time for its evaluation"
        )
    answer = task.sampling.max_tokens
    budget = limits.max_sampled_tokens
    if answer is not None and budget is not None and answer > budget:
        yield (
            f"sampling.max_tokens is {answer}, above limits.max_sampled_tokens, {budget}: the"
            " first answer may spend the session"
        )


def _list_commands(task: Task) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the fields and words of the commands of a `shell` agent; not of what is too complex."""
    if task.harness.name != SHELL:
        return
    for name in ("command", "setup"):
        command = task.harness.options.get(name, "")
        arguments = _split(command) if isinstance(command, str) else [*command]
        if arguments:
            yield f"harness.options.{name}", arguments


def _split(command: str) -> list[str]:
    """Return the words of the first simple command; none if the shell itself runs it."""
    try:
        arguments = shlex.split(_ENDS.split(command, maxsplit=1)[0])
    except ValueError:  # a quoted part has one of the characters
        return []
    while arguments and _ASSIGNMENT.match(arguments[0]):
        arguments.pop(0)
    return [] if not arguments or arguments[0] in _SHELL_WORDS or "$" in arguments[0] else arguments


def _list_paths(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the program, if it is a path, and the script of an interpreter."""
    if "/" in arguments[0]:
        yield arguments[0]
    if not _INTERPRETER.fullmatch(PurePosixPath(arguments[0]).name) or len(arguments) == 1:
        return
    script = arguments[1]
    if _SCRIPT.fullmatch(PurePosixPath(script).suffix) and "$" not in script:
        yield script


def _refuse_path(word: str, task: Task) -> str:
    """Return why no sandbox has a file; empty if it may have it."""
    path = Path(word)
    if path.is_absolute():
        is_program = word == _first_word(task)
        if is_program and path.is_file() and not os.access(path, os.X_OK):
            return (
                f"which cannot be executed; run chmod +x {word}, or put its interpreter before it"
            )
        return ""
    made = bool(task.harness.options.get("setup")) or task.workspace.has_base
    if made or os.path.normpath(word) in task.files or path.is_file():
        return ""
    return (
        "which is neither beside the task file nor among the files of the task; must be a path"
        " relative to the task file"
    )


def _first_word(task: Task) -> str:
    """Return the program of the agent's command."""
    return next((arguments[0] for _, arguments in _list_commands(task)), "")
