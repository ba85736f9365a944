"""The program itself: help, exit codes, and what starting it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from cyclopts import App

from tugline.cli.app import COMMANDS

ENGINE_ROOM = ("renderers", "openai", "torch", "transformers", "tokenizers", "starlette", "uvicorn")
"""Libraries of gateway, server and engine."""
CLIENT_ROOM = (*ENGINE_ROOM, "rich", "aiohttp", "numpy", "msgspec", "structlog", "yaml", "asyncio")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_is_the_one_of_the_command(name: str) -> None:
    """The table of summaries, which spares importing the commands, says what they say."""
    command = getattr(import_module(f"tugline.cli.{name}"), name)
    help_ = command.help if isinstance(command, App) else command.__doc__
    assert help_.partition("\n")[0] == COMMANDS[name]


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (("--help",), CLIENT_ROOM),
        (("--version",), CLIENT_ROOM),
        (("status", "--help"), ENGINE_ROOM),
        (("logs", "--help"), ENGINE_ROOM),
    ],
    ids=["help", "version", "status", "logs"],
)
def test_a_command_imports_only_what_it_needs(
    words: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    """Help needs no command's libraries, and a client's command none of the server's."""
    code = (
        "import sys\nfrom tugline.cli.app import main\n"
        f"sys.argv = ['tugline', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        f"found = sorted(set({heavy!r}) & sys.modules.keys())\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
