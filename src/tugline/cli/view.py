"""``tugline view``: look into one session, on the terminal, as JSON or as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tugline.errors import UsageError
from tugline.recording.file import read
from tugline.recording.folder import locate, tokenizer_of
from tugline.recording.view.document import document
from tugline.recording.view.session_view import as_json, tell
from tugline.recording.view.terminal import By, Terminal
from tugline.recording.view.texts import Texts


def view(  # noqa: PLR0913 - each is a flag
    session: Annotated[str, typer.Argument(help="A recording file, or the id of a session.")],
    *,
    builder: Annotated[
        str | None, typer.Option(help="Show the traces of this builder (default: the task's own).")
    ] = None,
    by: Annotated[By, typer.Option(help="What the colour of a token says.")] = By.MASK,
    turn: Annotated[
        int | None, typer.Option(help="Show only this call, with its messages.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Fold nothing.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, where none is kept beside the recording.")
    ] = None,
    as_json_: Annotated[
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
    told = tell(path, recording, builder)
    numbers = [one.call for one in told.story.turns]
    if turn is not None and turn not in numbers:
        known = f"its calls are {numbers[0]} to {numbers[-1]}" if numbers else "it has no calls"
        msg = f"--turn {turn}: there is no such call in {path}; {known}"
        raise UsageError(msg)
    texts = Texts(tokenizer_of(path, recording.header, tokenizer) if recording.header else None)
    if html is not None:
        html.write_text(document(told, texts), encoding="utf-8")
        typer.echo(f"wrote {html} ({html.stat().st_size / 1e3:,.0f} kB)", err=as_json_)
    if as_json_:
        typer.echo(as_json(told, turn=turn, full=full))
    elif html is None:
        terminal = Terminal(Console(highlight=False), told, texts, by=by, full=full)
        terminal.show() if turn is None else terminal.turn(turn)
