"""``tugline view``: show one session on the terminal, as JSON or as one HTML file."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tugline.errors import UsageError
from tugline.recording.file import read
from tugline.recording.folder import load_tokenizer, locate
from tugline.recording.view.html_page import render_page
from tugline.recording.view.session_view import TokenText, encode_json, view_session
from tugline.recording.view.terminal import Terminal

_WIDTH = 120
"""Cells of a line if the output is not a terminal."""


def view(  # noqa: PLR0913 - each is a flag
    session: Annotated[str, typer.Argument(help="A recording file, or the id of a session.")],
    *,
    builder: Annotated[
        str | None, typer.Option(help="Show the traces of this builder (default: the task's own).")
    ] = None,
    turn: Annotated[
        int | None, typer.Option(help="Show only this call, with its messages.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Fold nothing.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, where none is kept beside the recording.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; token by token with --full.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page to this file.")] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Show what comes before the damage of a broken file.")
    ] = False,
) -> None:
    """Show what happened in a session: turns, tokens, forks, ledger and timings."""
    path = locate(session)
    recording = read(path, salvage=salvage, bodies=False)
    session_view = view_session(path, recording, builder)
    numbers = [one.call for one in session_view.view.turns]
    if turn is not None and turn not in numbers:
        known = f"its calls are {numbers[0]} to {numbers[-1]}" if numbers else "it has no calls"
        msg = f"--turn {turn}: there is no such call in {path}; {known}"
        raise UsageError(msg)
    header = recording.header
    texts = TokenText(load_tokenizer(path, header, tokenizer) if header else None)
    if html is not None:
        html.write_text(render_page(session_view, texts), encoding="utf-8")
        typer.echo(f"wrote {html} ({html.stat().st_size / 1e3:,.0f} kB)", err=as_json)
    if as_json:
        typer.echo(encode_json(session_view, turn=turn, full=full))
    elif html is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        terminal = Terminal(console, session_view, texts, full=full)
        terminal.print_session() if turn is None else terminal.print_turn(turn)
