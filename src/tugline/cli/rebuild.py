"""``tugline rebuild``: make trajectories again from recorded sessions, byte for byte the same.

Exit code 0 if every recording gave a trajectory, 1 if one could not be read or built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from tugline.errors import UsageError
from tugline.recording.folder import list_recordings, locate
from tugline.recording.rebuild import rebuild_all
from tugline.recording.trajectories import INDEX, Index
from tugline.types import PluginSpec

_MANY = 20
"""Recordings from which on progress is shown."""


def rebuild(
    session: Annotated[
        str, typer.Argument(help="A recording file, a folder of them, or the id of a session.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="New folder for <session>.traj and index.json.")],
    builder: Annotated[
        str | None, typer.Option(help="Builder to use (default: the one of each task).")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="key=value for the builder; may be given again.")
    ] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Build what comes before the damage of a broken file.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the index as one JSON object.")
    ] = False,
) -> None:
    """Build trajectories from recorded sessions alone, for a trainer to load."""
    where = Path(session)
    found = list_recordings(where) if where.is_dir() else [locate(session)]
    part = _part(builder, option or [])
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=len(found) < _MANY) as progress:
        bar = progress.add_task("rebuilding", total=len(found))
        index = rebuild_all(
            found,
            where if where.is_dir() else found[0].parent,
            out,
            part,
            salvage=salvage,
            on_file=lambda: progress.advance(bar),
        )
    if as_json:
        typer.echo(msgspec.json.encode(index))
    else:
        _show(index, out)
    if any(entry.error for entry in index.entries):
        raise typer.Exit(1)


def _part(builder: str | None, options: list[str]) -> PluginSpec | None:
    if builder is None:
        if options:
            msg = f"--option {options[0]} is for a builder; name it with --builder"
            raise UsageError(msg)
        return None
    return PluginSpec(builder, dict(_option(text) for text in options))


def _option(text: str) -> tuple[str, Any]:
    """A value is JSON where it can be read as that, else text."""
    key, given, value = text.partition("=")
    if not key or not given:
        msg = f"--option {text!r} must be key=value, such as max_length=32768"
        raise UsageError(msg)
    try:
        return key, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return key, value


def _show(index: Index, out: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    made = [entry for entry in index.entries if entry.file]
    for entry in index.entries:
        if entry.error or entry.note:
            console.print(f"{entry.recording}: {entry.error or entry.note}", markup=False)
    console.print(
        f"{len(made)} of {len(index.entries)} recordings to {out}/{INDEX}: "
        f"{sum(entry.traces for entry in made)} traces, "
        f"{sum(entry.tokens for entry in made)} tokens, "
        f"{sum(entry.ledger.trained for entry in made)} of "
        f"{sum(entry.ledger.sampled for entry in made)} sampled ones trained",
        markup=False,
    )
