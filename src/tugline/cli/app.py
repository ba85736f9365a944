"""``tugline``: gathers the commands, and turns every known error into one line and an exit code.

0: done. 2: something the caller can mend (`UsageError`, or what a server refuses as wrong). 1: any
other failure. 130: interrupted.
A command's file is imported when the command is called, so that a server that was killed is back
before its clients have noticed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

import typer

from tugline import log
from tugline.cli.demo import INTERRUPTED
from tugline.errors import ServerError, TuglineError, UsageError

COMMANDS = (
    "bench", "cancel", "demo", "doctor", "export", "harness", "logs", "node", "rebuild", "replay",
    "results", "run", "status", "submit", "task", "tasks", "top", "up", "verify", "view",
)  # fmt: skip
"""Each is a function, or a group of commands, of the same name in the file of that name."""


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's own call
    if asked:
        typer.echo(f"tugline {version('tugline')}")
        raise typer.Exit


def root(
    *,
    _version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Train the model behind an agent without rewriting the agent."""


def program(called: str) -> typer.Typer:
    """The command line: the command that is called, or all of them where none of that name is."""
    app = typer.Typer(
        help="Reinforcement learning on real agent harnesses, unmodified.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(root)
    for name in (called,) if called in COMMANDS else COMMANDS:
        command = getattr(import_module(f"tugline.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main() -> None:
    """Run a command; the entry point of the ``tugline`` program."""
    log.configure()  # warnings to stderr: what a command prints is all that stdout has
    try:
        program(sys.argv[1] if len(sys.argv) > 1 else "")()
    except TuglineError as error:
        _fail(str(error), 2 if _can_be_mended(error) else 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)


def _can_be_mended(error: TuglineError) -> bool:
    refused = isinstance(error, ServerError) and 400 <= (error.status or 0) < 500
    return refused or isinstance(error, UsageError)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    typer.echo(f"tugline: {line}", err=True)
    sys.exit(code)
