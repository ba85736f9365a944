"""The program itself: help, completion, exit codes and imports."""

from __future__ import annotations

import inspect
import os
import re
import socket
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from cyclopts import App

import tugline
from recording.view.synthetic import small
from support.commands import TUGLINE, run_command, run_program, run_python
from tugline.cli import app
from tugline.cli.app import COMMANDS, DEVELOP, GROUPS, make_app
from tugline.cli.output import make_table, print_text

ENGINE_LIBRARIES = (
    "renderers",
    "openai",
    "torch",
    "transformers",
    "tokenizers",
    "starlette",
    "uvicorn",
)
"""Libraries of gateway, server and engine."""
COMMANDS_NEED = (
    *ENGINE_LIBRARIES,
    "aiohttp",
    "numpy",
    "msgspec",
    "structlog",
    "yaml",
    "asyncio",
    *(f"tugline.cli.{name}" for name in ("options", "output", *COMMANDS)),
)
"""Modules that commands import."""


@pytest.mark.parametrize("name", COMMANDS)
def test_command_summaries_match_the_commands(name: str) -> None:
    """The table, which saves importing the commands, has all that docstrings say before `Args`."""
    [summary] = [commands[name] for commands in GROUPS.values() if name in commands]
    command = getattr(import_module(f"tugline.cli.{name}"), name)
    if not isinstance(command, App):
        assert inspect.getdoc(command).partition("\n\nArgs:")[0] == summary
    assert make_app()[name].help == summary


def test_a_module_of_the_command_line_is_a_command_or_a_noun() -> None:
    """Each command has the module of its name; the other modules are what commands share."""
    folder = Path(app.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules - {*COMMANDS} == {
        "app", "harness_check", "key_values", "local_run", "machine", "node_options", "options",
        "output", "process", "rejudge_report", "rejudge_server", "tables", "training_run",
    }  # fmt: skip


def test_the_main_help_has_each_command_in_its_group() -> None:
    """A row has the command and its summary; what develops Tugline itself is left out."""
    help_ = run_command("--help", env={"COLUMNS": "120"}).stdout
    for title, commands in GROUPS.items():
        rows = [rf"│ {name} +{re.escape(summary)}" for name, summary in commands.items()]
        found = [re.search(pattern, help_) is not None for pattern in (rf"─ {title} ─", *rows)]
        assert {*found} == {title != DEVELOP}
    check = run_command("harness", "check", "--help").stdout
    assert re.search(rf"─ {DEVELOP} ─+╮\n│ --all ", check)


@pytest.mark.parametrize("arguments", ["--version", "status --version", "task --version"])
def test_the_version_is_that_of_tugline(arguments: str) -> None:
    """The option `--version` prints the version, also after a command."""
    done = run_command(*arguments.split())
    assert (done.returncode, done.stdout) == (0, f"tugline {tugline.__version__}\n")


@pytest.mark.parametrize("arguments", ["", "-h", "--help"])
def test_without_a_command_the_help_is_printed(arguments: str) -> None:
    """The help is the same with `-h`, with `--help` and without arguments."""
    assert run_command(*arguments.split()).stdout.startswith("Usage: tugline COMMAND\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_have_every_command(shell: str) -> None:
    """Each script has the commands of the main help, and their subcommands."""
    done = run_command("--completion", shell)
    assert done.returncode == 0, done.stderr
    assert all(
        name in done.stdout
        for name in ({*COMMANDS} - {*GROUPS[DEVELOP]} | {"prefetch", "max-length"})
    )


def test_bash_completes() -> None:
    """The script completes commands and subcommands in a real bash."""
    script = run_command("--completion", "bash").stdout
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tugline; echo "${COMPREPLY[@]}"'
    for line, completed in (("tugline exp", "export"), ("tugline task pre", "prefetch")):
        done = run_program("bash", "-c", f"{script}\n{ask}", "bash", *line.split(), check=True)
        assert done.stdout.split() == [completed]


@pytest.mark.parametrize("arguments", ["task init --help", "-h"])
def test_a_closed_pipe_ends_a_command_quietly(arguments: str) -> None:
    """A command whose reader has ended, such as ``head``, exits with 1 and prints no error."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        argv = [TUGLINE, *arguments.split()]
        done = subprocess.run(argv, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_stdout_may_be_closed_or_ascii(tmp_path: Path) -> None:
    """A command works without stdout, as in a daemon, and on a terminal without UTF-8."""
    small(tmp_path / "runs")
    closed = run_program("sh", "-c", 'exec "$0" --version >&-', TUGLINE)
    assert (closed.returncode, closed.stderr) == (0, "")
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ascii_only = run_program(TUGLINE, "view", "s-1", cwd=tmp_path, env=env)
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "\\u" in ascii_only.stdout


@pytest.mark.parametrize("columns", [None, "40"])
def test_table_cells_are_not_cut_in_files(
    columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output that is no terminal has whole names, unless ``COLUMNS`` limits the width."""
    name = f"session-{'x' * 90}"
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    print_text(make_table(("session", "reason"), [(name, "because " * 12)]))
    (_, row, *more) = capsys.readouterr().out.splitlines()
    assert (name in row, more) == (True, []) if columns is None else len(row) == 40


def test_a_taken_port_is_the_only_line_on_stderr(tmp_path: Path) -> None:
    """A start that fails for a taken port prints the error and no log or warning beside it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_program(TUGLINE, "up", "--no-node", "--port", port, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_options_and_arguments_can_be_mixed() -> None:
    """Positional arguments may be repeated; a repeated option collects its values."""
    line = "export sft a.rec --out x --tag k=1 b.rec --tag l=2 --min-reward -1 --json"
    _, bound, _ = make_app().parse_args(line.split())
    given = bound.arguments
    assert (given["form"], given["sessions"], given["as_json"]) == ("sft", ("a.rec", "b.rec"), True)
    assert (given["filters"].tag, given["filters"].min_reward) == (["k=1", "l=2"], -1.0)


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        ("--help", COMMANDS_NEED),
        ("--version", COMMANDS_NEED),
        ("--completion bsh", COMMANDS_NEED),
        ("stats", COMMANDS_NEED),
        ("status --help", ENGINE_LIBRARIES),
        ("logs --help", ENGINE_LIBRARIES),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: str, heavy: tuple[str, ...]) -> None:
    """Help and mistakes import no command, and a client command no library of the server."""
    code = (
        "import sys\nfrom tugline.cli.app import main\n"
        f"sys.argv = 'tugline {arguments}'.split()\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert ended.code in (None, 0, 2)\n"
        f"imported = sorted(set({heavy!r}) & sys.modules.keys())\n"
        "assert not imported, imported\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
