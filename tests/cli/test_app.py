"""The program itself: help, exit codes, and what starting it costs."""

from __future__ import annotations

import os
import socket
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from cyclopts import App

from commands import TUGLINE, run_command, run_program, run_python
from recording.view.synthetic import small
from tugline.cli.app import COMMANDS, MODULES, make_app
from tugline.cli.output import make_table, print_text

ENGINE_ROOM = ("renderers", "openai", "torch", "transformers", "tokenizers", "starlette", "uvicorn")
"""Libraries of gateway, server and engine."""
CLIENT_ROOM = (*ENGINE_ROOM, "rich", "aiohttp", "numpy", "msgspec", "structlog", "yaml", "asyncio")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_is_the_one_of_the_command(name: str) -> None:
    """The table of summaries, which spares importing the commands, says what they say."""
    command = getattr(import_module(f"tugline.cli.{MODULES.get(name, name)}"), name)
    help_ = command.help if isinstance(command, App) else command.__doc__
    assert help_.partition("\n")[0] == COMMANDS[name]
    assert name in make_app(name)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_completes(shell: str) -> None:
    """Every command is in it, and those of groups."""
    done = run_command("--completion", shell)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*COMMANDS, "prefetch", "max-length"))


def test_bash_completes() -> None:
    """The script in a real bash: commands, and the commands of a group."""
    script = run_command("--completion", "bash").stdout
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tugline; echo "${COMPREPLY[@]}"'
    for words, completed in (("tugline exp", "export"), ("tugline task pre", "prefetch")):
        done = run_program("bash", "-c", f"{script}\n{ask}", "bash", *words.split(), check=True)
        assert done.stdout.split() == [completed]


@pytest.mark.parametrize("arguments", ["task init --help", "-h"])
def test_a_reader_that_goes_away_ends_a_command_quietly(arguments: str) -> None:
    """As ``head`` does."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        argv = [TUGLINE, *arguments.split()]
        done = subprocess.run(argv, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_streams_may_be_closed_or_know_few_characters(tmp_path: Path) -> None:
    """As those of a daemon are, or of a terminal without UTF-8."""
    small(tmp_path / "runs")
    closed = run_program("sh", "-c", 'exec "$0" --version >&-', TUGLINE)
    assert (closed.returncode, closed.stderr) == (0, "")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = run_program(TUGLINE, "view", "s-1", cwd=tmp_path, env=env)
    assert (shown.returncode, shown.stderr, "\\u" in shown.stdout) == (0, "", True)


@pytest.mark.parametrize("columns", [None, "40"])
def test_a_file_gets_whole_cells(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that reads a table finds whole names, unless a width was asked for."""
    name = f"session-{'x' * 90}"
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    print_text(make_table(("session", "reason"), [(name, "because " * 12)]))
    (_, row, *more) = capsys.readouterr().out.splitlines()
    assert (name in row, more) == (True, []) if columns is None else len(row) == 40


def test_an_error_is_all_that_stands_on_stderr(tmp_path: Path) -> None:
    """What was prepared for the work that is not begun says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_program(TUGLINE, "up", "--no-node", "--port", port, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_options_stand_before_and_behind_arguments() -> None:
    """Each of many arguments is taken; an option that is repeated collects its values."""
    words = "export sft a.rec --out x --tag k=1 b.rec --tag l=2 --min-reward -1 --json"
    _, bound, _ = make_app("export").parse_args(words.split())
    given = bound.arguments
    assert (given["form"], given["sessions"], given["as_json"]) == ("sft", ("a.rec", "b.rec"), True)
    assert (given["filters"].tag, given["filters"].min_reward) == (["k=1", "l=2"], -1.0)


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (("--help",), CLIENT_ROOM),
        (("--version",), CLIENT_ROOM),
        (("status", "--help"), ENGINE_ROOM),
        (("logs", "--help"), ENGINE_ROOM),
    ],
    ids=["help", "version", "status", "logs"],
)
def test_a_command_imports_only_what_it_needs(
    arguments: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    """Help needs no command's libraries, and a client's command none of the server's."""
    code = (
        "import sys\nfrom tugline.cli.app import main\n"
        f"sys.argv = ['tugline', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        f"found = sorted(set({heavy!r}) & sys.modules.keys())\n"
        "assert not found, found\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
