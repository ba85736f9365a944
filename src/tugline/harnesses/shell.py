"""The user's own agent: any command that talks to a model through the usual environment variables.

Every official SDK reads its base URL and key from the environment, so a script written for a
hosted model runs here as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tugline.errors import ConfigError
from tugline.harnesses.base import Launch, LaunchContext
from tugline.sandbox.base import Mount

_LONGEST_VARIABLE = 100_000
"""Linux refuses to start a program with a longer variable (128 KiB with its name)."""


class Shell:
    """`command` runs in the task's folder: a list is a program, a string goes to ``sh -c``.

    A word of it that names a file of the folder where Tugline was started means that file, and a
    sandbox shows it; `folders` are further ones of this machine that it shows, read-only, at their
    own paths. `env` is added to the variables that `launch` sets.
    """

    name = "shell"
    version: str | None = None

    def __init__(
        self,
        *,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        folders: Sequence[str] = (),
    ) -> None:
        words = re.split(r"(\s+)", command) if isinstance(command, str) else command
        files = [_file(word) for word in words]
        if isinstance(command, str):
            quoted = (
                shlex.quote(file) if file else word for word, file in zip(words, files, strict=True)
            )
            self._argv: tuple[str, ...] = ("sh", "-c", "".join(quoted))
        else:
            self._argv = tuple(file or word for word, file in zip(words, files, strict=True))
        for folder in folders:
            if not Path(folder).is_absolute():
                msg = f"harness 'shell': folders names {folder!r}, must be an absolute path"
                raise ConfigError(msg)
        shown = dict.fromkeys([*filter(None, files), *folders])
        self.mounts = tuple(Mount(path, path) for path in shown)
        if not "".join(command).strip():
            msg = f"harness 'shell': command is {command!r}, must name a program"
            raise ConfigError(msg)
        self._env = dict(env or {})

    async def install(self) -> None:
        """Nothing: the program is the user's."""

    def launch(self, seat: LaunchContext) -> Launch:
        """The command, with base URL, key and model under the names that SDKs look for."""
        variables = {
            "HOME": seat.home,
            "OPENAI_BASE_URL": f"{seat.base_url}/v1",
            "OPENAI_API_KEY": seat.key,
            "OPENAI_MODEL": seat.model,
            "ANTHROPIC_BASE_URL": seat.base_url,
            "ANTHROPIC_API_KEY": seat.key,
            "ANTHROPIC_MODEL": seat.model,
            "GOOGLE_GEMINI_BASE_URL": seat.base_url,
            "GEMINI_API_KEY": seat.key,
            "GEMINI_MODEL": seat.model,
            "TUGLINE_INSTRUCTION_FILE": f"{seat.home}/instruction.txt",
        }
        if len(seat.instruction.encode()) <= _LONGEST_VARIABLE:
            variables["TUGLINE_INSTRUCTION"] = seat.instruction
        return Launch(
            argv=self._argv,
            env={**variables, **self._env},
            files={"instruction.txt": seat.instruction},
        )


def _file(word: str) -> str | None:
    """The file that a word of a command names; None for any other word."""
    # `Path.is_file` raises for a word that is longer than any name, such as a script after -c.
    path = Path.cwd() / word
    if not word.strip() or not os.path.isfile(path):  # noqa: PTH113
        return None
    system = ("/usr", sys.prefix, sys.base_prefix)
    own = any(path.resolve().is_relative_to(folder) for folder in system)
    return None if own and Path(word).is_absolute() else str(path)
