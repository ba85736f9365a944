"""Output of commands: JSON for programs, text and tables for people, a bar on a terminal."""

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from tugline.launch.progress import WorkProgress

T = TypeVar("T")

COLOURS = {
    "pass": "green",
    "warn": "yellow",
    "fail": "red",
    "unknown": "yellow",
    "unchecked": "yellow",
}
"""Colours of the results of checks."""
_FILE_WIDTH = 1 << 16
"""Width of output that is not a terminal, in columns."""


class _BackgroundFile(io.TextIOBase):
    """File whose writes run in a thread; text is dropped while the queue is full."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.texts: queue.Queue[str] = queue.Queue(1000)
        threading.Thread(target=self._write_all, daemon=True).start()

    def write(self, text: str) -> int:
        """Queue the text to be written."""
        with contextlib.suppress(queue.Full):
            self.texts.put_nowait(text)
        return len(text)

    def isatty(self) -> bool:
        """Whether the file is a terminal."""
        return self._file.isatty()

    def _write_all(self) -> None:
        while True:
            text = self.texts.get()
            with contextlib.suppress(OSError, ValueError):  # the reader is gone
                self._file.write(text)
                self._file.flush()
            self.texts.task_done()


@contextlib.contextmanager
def background_stderr(within_s: float = 1.0) -> Iterator[None]:
    """Write stderr in a thread, so that a blocked terminal does not block a server.

    At the end of the block, wait up to `within_s` for queued text.
    """
    with contextlib.redirect_stderr(_BackgroundFile(sys.stderr)) as file:
        try:
            yield
        finally:
            with (done := file.texts.all_tasks_done):
                done.wait_for(lambda: not file.texts.unfinished_tasks, within_s)


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def print_report(
    report: object, show: Callable[[], object], *, as_json: bool, failed: bool = False
) -> None:
    """Print a report as JSON or, for people, with `show`; exit with 1 if `failed`."""
    if as_json:
        print_json(report)
    else:
        show()
    if failed:
        sys.exit(1)


def print_text(*parts: RenderableType, style: str = "", stderr: bool = False) -> None:
    """Print tables, and literal text without wrapping; tables in files are not truncated."""
    console = Console(highlight=False, markup=False, stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    for part in parts:
        console.print(part, style=style, soft_wrap=isinstance(part, str))


def echo(line: str) -> None:
    """Print a line for people on stderr."""
    print_text(line, stderr=True)


def make_table(columns: Sequence[Column | str], rows: Iterable[Sequence[object]]) -> Table:
    """Create a table without lines; cells are literal text, or `Text` with a style."""
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def format_counts(counts: Mapping[Any, int]) -> str:
    """Format counts as a list, such as ``2 passed, 1 failed``; zeros are left out."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def show_progress(title: str, unit: str = "", total: int | None = None) -> WorkProgress:
    """Create a context manager that shows the progress of work on stderr."""
    console = Console(stderr=True, highlight=False, markup=False)
    return WorkProgress(console, unit, total, title=title)


def track(items: Collection[T], title: str, unit: str) -> Iterator[T]:
    """Yield `items`, and show on stderr how many were taken."""
    with show_progress(title, unit, len(items)) as progress:
        for item in items:
            yield item
            progress.advance()


def save_report(path: Path, report: object, *, as_json: bool) -> None:
    """Write a report to a file as JSON; also print it with `as_json`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if as_json:
        print_json(report)
