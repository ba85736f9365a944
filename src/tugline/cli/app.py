"""``tugline``: gathers the commands, and turns every known error into one line and an exit code.

0: done. 2: something the caller can mend (`UsageError`). 1: any other failure. 130: interrupted.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import typer

from tugline.cli.bench import bench
from tugline.cli.demo import INTERRUPTED, demo
from tugline.cli.doctor import doctor
from tugline.cli.export import export
from tugline.cli.harness import harness
from tugline.cli.rebuild import rebuild
from tugline.cli.replay import replay
from tugline.cli.trace import trace
from tugline.cli.verify import verify
from tugline.errors import TuglineError, UsageError

app = typer.Typer(
    help="Reinforcement learning on real agent harnesses, unmodified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(demo)
app.command()(doctor)
app.command()(export)
app.command()(rebuild)
app.command()(replay)
app.command()(trace)
app.command()(verify)
app.add_typer(harness, name="harness")


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's own call
    if asked:
        typer.echo(f"tugline {version('tugline')}")
        raise typer.Exit


@app.callback()
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


def main() -> None:
    """Run a command; the entry point of the ``tugline`` program."""
    try:
        app()
    except TuglineError as error:
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    typer.echo(f"tugline: {line}", err=True)
    sys.exit(code)
