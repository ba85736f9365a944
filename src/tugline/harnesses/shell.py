"""The user's own agent: any command that calls a model through the usual environment variables.

Every official SDK reads its base URL and key from the environment, so a script written for a
hosted model runs unchanged.
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
"""Bytes. Linux starts no program with a longer variable (128 KiB with its name)."""


@dataclass(kw_only=True, eq=False)
class Shell(Harness):
    """`command` runs in the task's folder: a list is a program, a string goes to ``sh -c``.

    A word that names a file in the folder where Tugline was started is replaced by its absolute
    path, and the file is mounted; `folders` of this machine are mounted read-only at their own
    paths. `env` is added to the variables that `launch` sets.
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
        found = [quote(file) if file else word for word, file in zip(words, files, strict=True)]
        self._argv = ("sh", "-c", "".join(found)) if isinstance(command, str) else tuple(found)
        for folder in self.folders:
            if not Path(folder).is_absolute():
                msg = f"harness 'shell': folders names {folder!r}, must be an absolute path"
                raise ConfigError(msg)
        paths = dict.fromkeys([*filter(None, files), *self.folders])
        self.mounts = tuple(Mount(path, path) for path in paths)
        if not "".join(command).strip():
            raise ConfigError(f"harness 'shell': command is {command!r}, must name a program")

    def launch(self, context: LaunchContext) -> Launch:
        """The command, with base URL, key and model under the names that SDKs read."""
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
    """The absolute path of a file that a word names, unless it is the system's; else None."""
    # `Path.is_file` raises for a word that is longer than any name, such as a script after -c.
    path = Path.cwd() / word
    if not word.strip() or not os.path.isfile(path):  # noqa: PTH113
        return None
    system = ("/usr", sys.prefix, sys.base_prefix)
    own = any(path.resolve().is_relative_to(folder) for folder in system)
    return None if own and Path(word).is_absolute() else str(path)
