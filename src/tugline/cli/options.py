"""Options that several commands share, and the client that they configure."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from tugline.client.api import Client
from tugline.errors import UsageError

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""

Server = Annotated[
    str | None, typer.Option(help="URL of the server (default: TUGLINE_SERVER, else --dir).")
]
Token = Annotated[str | None, typer.Option(help="Its token (default: TUGLINE_TOKEN, else --dir).")]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Folder of `tugline up` (default: tugline-data).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrainingFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder of the run (default: runs/<name>-<time>).")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out, or the last one.")
]

_DEADLINE_S = 10.0
"""A server that does not answer is reported soon; streams and waits survive its restarts."""


def connect(server: str | None, token: str | None, folder: Path | None) -> Client:
    """Create the client of a command, to be used as an async context manager."""
    return Client(server, token, folder=folder, deadline_s=_DEADLINE_S)


def make_bar(console: Console, *columns: ProgressColumn, transient: bool = True) -> Progress:
    """Make a bar with its count and `columns`; only a terminal shows it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def name_missing_extra(extra: str) -> Iterator[None]:
    """Raise `UsageError` with the extra to install if one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this command needs {error.name}: pip install 'tugline[{extra}]'"
        raise UsageError(msg) from error


def save_report(path: Path, report: object, *, as_json: bool) -> None:
    """Write a report to a file as JSON, and print it if asked to."""
    encoded = msgspec.json.encode(report)
    path.write_bytes(msgspec.json.format(encoded) + b"\n")
    if as_json:
        typer.echo(encoded)
