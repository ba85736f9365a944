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
    `env` is added to the variables of `launch`.
    """

    name = "shell"

    command: str | Sequence[str]
    env: Mapping[str, str] | None = None
    folders: Sequence[str] = ()

    def __post_init__(self) -> None:
        command = self.command
        words = re.split(r"(\s+)", command) if isinstance(command, str) else command
        files = [_find_file(word) for word in words]
        quote = shlex.quote if isinstance(command, str) else str
        argv = [quote(file) if file else word for word, file in zip(words, files, strict=True)]
        self._argv = ("sh", "-c", "".join(argv)) if isinstance(command, str) else tuple(argv)
        for folder in self.folders:
            if not Path(folder).is_absolute():
                msg = f"harness 'shell': folders names {folder!r}, must be an absolute path"
                raise ConfigError(msg)
        paths = dict.fromkeys([*filter(None, files), *self.folders])
        self.mounts = tuple(Mount(path, path) for path in paths)
        if not "".join(command).strip():
            raise ConfigError(f"harness 'shell': command is {command!r}, must name a program")

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
            env={**variables, **(self.env or {})},
            files={"instruction.txt": context.instruction},
        )


def _find_file(word: str) -> str | None:
    """Return the absolute path of the file that a word names; None if none or a system file."""
    # `Path.is_file` raises for a word that is too long for a name, such as a script after -c.
    path = Path.cwd() / word
    if not word.strip() or not os.path.isfile(path):  # noqa: PTH113
        return None
    folders = ("/usr", os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    in_system = any(path.resolve().is_relative_to(folder) for folder in folders)
    return None if in_system and Path(word).is_absolute() else str(path)
