"""What commands print: JSON for programs, text and tables for people, a bar on a terminal."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def print_report(
    report: object, show: Callable[[], object], *, as_json: bool, failed: bool = False
) -> None:
    """Print a report as JSON or, for people, by `show`; exit with 1 if something `failed`."""
    if as_json:
        print_json(report)
    else:
        show()
    if failed:
        sys.exit(1)


def print_text(*parts: RenderableType, style: str = "", stderr: bool = False) -> None:
    """Print tables, and lines of literal text that are not wrapped."""
    console = Console(highlight=False, markup=False, stderr=stderr)
    for part in parts:
        console.print(part, style=style, soft_wrap=isinstance(part, str))


def make_table(columns: Sequence[Column | str], rows: Iterable[Sequence[object]]) -> Table:
    """Make a table without lines; cells are literal text, or `Text` with a style."""
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def format_counts(counts: Mapping[Any, int]) -> str:
    """Format counts as a list, such as ``2 passed, 1 failed``; zeros are left out."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


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


def save_report(path: Path, report: object, *, as_json: bool) -> None:
    """Write a report to a file as JSON, and print it if asked to."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if as_json:
        print_json(report)
