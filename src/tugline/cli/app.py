"""``tugline``: dispatch to the commands; every known error becomes one line and an exit code.

0: done. 2: the caller can correct it (`UsageError`, or a request that the server refuses).
1: any other failure. 130: interrupted.
The file of a command is imported when the command is called, so that ``--help`` is quick and a
server that was killed is back before its clients notice.
"""

import sys
from importlib import import_module

import typer

from tugline.errors import ServerError, TuglineError, UsageError

COMMANDS = {
    "bench": "Measure what a part costs, next to the least that it could.",
    "cancel": "Cancel tasks or sessions; results so far are kept.",
    "demo": "Train a tiny model on a real, unmodified agent in minutes.",
    "doctor": "Check an engine's modes and flags, this machine's runtimes, or a server.",
    "eval": "Measure a model on tasks: pass@1, pass@k, intervals, and what changed.",
    "export": "Write recorded sessions to a file that other tools and trainers read.",
    "generate": "Run tasks with a strong model; keep what was accepted as a set for `tugline sft`.",
    "harness": "The agent programs that can be run.",
    "logs": "Print the log of a session.",
    "node": "Run sessions for a server, as many as there are slots, until it is stopped.",
    "rebuild": "Build trajectories from recorded sessions alone, for a trainer to load.",
    "replay": "Run the harness of a recorded session again on the recorded answers.",
    "results": "Read results in order of commit, and save them with their trajectories.",
    "run": "Run tasks on this machine and keep every result in a folder.",
    "sft": "Fine-tune a model on accepted conversations or traces; resumable at any point.",
    "status": "Show what is queued, running and done.",
    "submit": "Submit tasks.",
    "task": "Task files.",
    "tasks": "Task sets.",
    "train": "Train a model on tasks, with evaluations on the way; resumable at any point.",
    "up": "Start server, node and engine, and run what is submitted until it is stopped.",
    "verify": "Check recorded ids, texts, lineage, ledgers and logprobs.",
    "view": "Show what happened in a session: turns, tokens, forks, ledger and timings.",
}
"""Each is a function, or a group of commands, of the same name in the module of that name."""


def _print_version(requested: bool) -> None:  # noqa: FBT001 - typer's own call
    if requested:
        from importlib.metadata import version  # noqa: PLC0415 - start-up: only for --version

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


def make_app(called: str) -> typer.Typer:
    """Make the command line with the called command, or with the help of all of them."""
    app = typer.Typer(
        help="Reinforcement learning on real agent harnesses, unmodified.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if called in COMMANDS else None,  # rich doubles the time of --help
    )
    app.callback()(root)
    if called not in COMMANDS:
        for name, summary in COMMANDS.items():
            app.command(name, short_help=summary)(lambda: None)
        return app
    command = getattr(import_module(f"tugline.cli.{called}"), called)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=called)
    else:
        # The options of a benchmark are those of a program of its own.
        settings = {"ignore_unknown_options": called == "bench"}
        app.command(called, context_settings=settings)(command)
    return app


def main() -> None:
    """Run a command; the entry point of the ``tugline`` program."""
    called = sys.argv[1] if len(sys.argv) > 1 else ""
    if called in COMMANDS:
        from tugline import log  # noqa: PLC0415 - start-up: --help logs nothing

        log.configure()  # warnings to stderr: stdout has only what a command prints
    try:
        make_app(called)()
    except TuglineError as error:
        _exit(str(error), 2 if _is_correctable(error) else 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _exit(f"{where}{error.strerror or error}", 1)
    except KeyboardInterrupt:
        _exit("interrupted", 130)


def _is_correctable(error: TuglineError) -> bool:
    refused = isinstance(error, ServerError) and 400 <= (error.status or 0) < 500
    return refused or isinstance(error, UsageError)


def _exit(message: str, code: int) -> None:
    line = " ".join(message.split())
    typer.echo(f"tugline: {line}", err=True)
    sys.exit(code)
