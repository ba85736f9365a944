"""Custom agents: any command that calls a model by the usual environment variables.

The official SDKs read base URL and key from the environment, so a script for a hosted model runs
unchanged.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tugline.errors import ConfigError
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.sandbox.base import Mount

_MAX_VARIABLE = 100_000
"""Maximum bytes of a variable's value: Linux allows 128 KiB including the name."""


@dataclass(kw_only=True, eq=False)
class Shell(Harness):
    """Runs `command` in the task's folder: a program with arguments, or a string for ``sh -c``.

    A word that names a file, relative to Tugline's working folder, is replaced by the absolute path
    and the file is mounted. `folders` of this machine are mounted read-only at their own paths.
    `env` is added to the variables of `launch`. `setup` is a command in the same forms that must
    succeed before, such as a login. The other options are described at `Harness`.
    """

    name = "shell"

    command: str | Sequence[str]
    env: Mapping[str, str] | None = None
    folders: Sequence[str] = ()
    setup: str | Sequence[str] = ()
    offers_tools: bool = False
    spent_status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 400
    log_globs: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not "".join(self.command).strip():
            raise ConfigError(f"harness 'shell': command is {self.command!r}, must name a program")
        self._argv, files = _parse_command(self.command)
        self._setup, setup_files = _parse_command(self.setup)
        for pattern in self.log_globs:
            if pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
                msg = (
                    f"harness 'shell': log_globs has {pattern!r}, must be a path relative to "
                    "the home"
                )
                raise ConfigError(msg)
        for folder in self.folders:
            if not Path(folder).is_absolute():
                msg = f"harness 'shell': folders has {folder!r}, must be an absolute path"
                raise ConfigError(msg)
        paths = dict.fromkeys([*files, *setup_files, *self.folders])
        self.mounts = tuple(Mount(path, path) for path in paths)

    def launch(self, context: LaunchContext) -> Launch:
        """Return the command, with base URL, key and model in the variables that SDKs read."""
        variables = {
            "HOME": context.home,
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_API_KEY": context.key,
            "OPENAI_MODEL": context.model,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.key,
            "ANTHROPIC_MODEL": context.model,
            "GOOGLE_GEMINI_BASE_URL": context.base_url,
            "GEMINI_API_KEY": context.key,
            "GEMINI_MODEL": context.model,
            "TUGLINE_INSTRUCTION_FILE": f"{context.home}/instruction.txt",
        }
        if len(context.instruction.encode()) <= _MAX_VARIABLE:
            variables["TUGLINE_INSTRUCTION"] = context.instruction
        return Launch(
            argv=self._argv,
            setup=self._setup,
            env={**variables, **(self.env or {})},
            files={"instruction.txt": context.instruction},
        )


def _parse_command(command: str | Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the arguments of a command, and the files that its words name."""
    words = re.split(r"(\s+)", command) if isinstance(command, str) else command
    files = [_find_file(word) for word in words]
    quote = shlex.quote if isinstance(command, str) else str
    argv = [quote(file) if file else word for word, file in zip(words, files, strict=True)]
    named = [file for file in files if file is not None]
    if not isinstance(command, str):
        return tuple(argv), named
    return ("sh", "-c", "".join(argv)) if command.strip() else (), named


def _find_file(word: str) -> str | None:
    """Return the absolute path of the file that a word names; None if none or a system file."""
    # `Path.is_file` raises for a word that is too long for a name, such as a script after -c.
    path = Path.cwd() / word
    if not word.strip() or not os.path.isfile(path):  # noqa: PTH113
        return None
    folders = ("/usr", os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    in_system = any(path.resolve().is_relative_to(folder) for folder in folders)
    return None if in_system and Path(word).is_absolute() else str(path)
