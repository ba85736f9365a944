"""``tugline export``: recorded sessions as Parquet, as chat, or in the shape a trainer eats."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tugline.capture.folder import locate, segments_in
from tugline.errors import UsageError
from tugline.exports.base import Wanted
from tugline.exports.pipeline import Export, Summary, run
from tugline.exports.select import Selection, Split
from tugline.plugins import find
from tugline.types import Part, Status, TraceKind

_Texts = list[str] | None
_NONE = "-"
_SUM = 1e-6


def export(  # noqa: PLR0913 - each is a flag
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="parquet, arrow, calls, sft, trl, verl, slime or module:Class."
        ),
    ],
    sessions: Annotated[
        list[str], typer.Argument(help="Segment files, folders of them, or ids of sessions.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="File to write; with --split, a folder.")],
    options: Annotated[
        _Texts, typer.Option("--with", help="key=value for the format; may be given again.")
    ] = None,
    builder: Annotated[
        str | None, typer.Option(help="Builder to use (default: the one of each task).")
    ] = None,
    builder_options: Annotated[
        _Texts, typer.Option("--option", help="key=value for the builder; may be given again.")
    ] = None,
    status: Annotated[
        str | None, typer.Option(help="Only sessions that ended so, such as completed,timed_out.")
    ] = None,
    tag: Annotated[
        _Texts, typer.Option(help="Only tasks with this tag, as key=value; may be given again.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only sessions that earned at least this.")
    ] = None,
    best_of: Annotated[
        int | None, typer.Option(min=1, help="Only this many of the best sessions of each task.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The same as --best-of 1.")] = False,
    one_per_task: Annotated[
        bool, typer.Option("--one-per-task", help="One session of each task, drawn by --seed.")
    ] = False,
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Of sessions of a task that say the same, the first.")
    ] = False,
    kind: Annotated[
        str | None, typer.Option(help="Only traces of these kinds, such as main,subagent.")
    ] = None,
    exact_only: Annotated[
        bool, typer.Option("--exact-only", help="Only traces in the exact context of sampling.")
    ] = False,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Only traces of at most so many tokens.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Deal tasks to files, such as train=0.9,test=0.1.")
    ] = None,
    stratify: Annotated[
        str | None, typer.Option(help="Deal each value of this tag in the shares of --split.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of --split and --one-per-task.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False,
) -> None:
    """Write recorded sessions to a file that other tools and trainers read."""
    exporter = find("export", form)(**dict(_pair(text, "--with") for text in options or ()))
    if builder is None and builder_options:
        msg = f"--option {builder_options[0]} is for a builder; name it with --builder"
        raise UsageError(msg)
    given = dict(_pair(text, "--option") for text in builder_options or ())
    plan = Export(
        exporter=exporter,
        out=out,
        selection=Selection(
            status=_words(status, Status, "--status"),
            tags=dict(_pair(text, "--tag") for text in tag or ()),
            min_reward=min_reward,
            dedupe=dedupe,
            best_of=1 if best else best_of,
            one_per_task=one_per_task,
            seed=seed,
        ),
        wanted=Wanted(_words(kind, TraceKind, "--kind"), exact_only, max_length),
        builder=Part(builder, {key: _value(text) for key, text in given.items()})
        if builder is not None
        else None,
        split=_split(split, stratify, seed),
        force=force,
    )
    summary = _run(plan, _paths(sessions))
    if as_json:
        typer.echo(msgspec.json.encode(summary))
    else:
        _show(summary)


def _run(plan: Export, paths: list[Path]) -> Summary:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {what: progress.add_task(what, total=None) for what in ("reading", "writing")}
        return run(
            plan, paths, lambda what, n, of: progress.update(bars[what], completed=n, total=of)
        )


def _paths(sessions: Iterable[str]) -> list[Path]:
    found = [
        path
        for name in sessions
        for path in (segments_in(Path(name)) if Path(name).is_dir() else [locate(name)])
    ]
    return list(dict.fromkeys(found))


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, given, value = text.partition("=")
    if not key or not given:
        msg = f"{flag} {text!r} must be key=value"
        raise UsageError(msg)
    return key, value


def _value(text: str) -> Any:
    """JSON where it can be read as that, else text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


E = TypeVar("E", bound=StrEnum)


def _words(text: str | None, kind: type[E], flag: str) -> frozenset[E]:
    try:
        return frozenset(kind(word.strip()) for word in text.split(",")) if text else frozenset()
    except ValueError as error:
        msg = f"{flag} {text!r}: {error}; known: {', '.join(kind)}"
        raise UsageError(msg) from error


def _split(text: str | None, stratify: str | None, seed: int) -> Split | None:
    if text is None:
        if stratify is not None:
            msg = f"--stratify {stratify} needs a --split, such as train=0.9,test=0.1"
            raise UsageError(msg)
        return None
    try:
        shares = {k: float(v) for k, v in (_pair(one, "--split") for one in text.split(","))}
    except ValueError as error:
        msg = f"--split {text!r} must be names and shares, such as train=0.9,test=0.1"
        raise UsageError(msg) from error
    fine = all(share > 0 for share in shares.values()) and abs(sum(shares.values()) - 1) < _SUM
    if not fine or len(shares) <= text.count(","):
        msg = f"--split {text!r}: shares must be above 0 and add up to 1, each name be there once"
        raise UsageError(msg)
    if any(not name.replace("-", "_").isidentifier() for name in shares):
        msg = f"--split {text!r}: a name is part of a file name; use letters, digits, _ and -"
        raise UsageError(msg)
    return Split(shares=shares, stratify=stratify, seed=seed)


def _show(summary: Summary) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table("file", *("tasks", "sessions", "rows", "tokens", "trained"), box=None)
    for one in summary.files.values():
        counts = (one.tasks, one.sessions, one.rows, one.tokens, one.trained)
        table.add_row(one.path, *(f"{count:,}" for count in counts))
    console.print(table)
    left, rows = _reasons(summary.left_out), _reasons(summary.rows_left_out)
    console.print(f"{summary.kept} of {summary.found} sessions; left out: {left}", markup=False)
    if summary.rows_left_out:
        console.print(f"of these, rows left out: {rows}", markup=False)
    for error in summary.errors:
        Console(stderr=True).print(error, markup=False, soft_wrap=True)


def _reasons(counts: dict[Any, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or _NONE
