"""``tugline export``: recorded sessions as Parquet, conversations, or files for other trainers."""

from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote, Required
from tugline.cli.output import format_counts, make_table, print_report, print_text
from tugline.cli.rebuild import parse_builder, parse_options, parse_pairs
from tugline.errors import UsageError
from tugline.exports.base import TraceFilter, make_exporter
from tugline.exports.pipeline import Export, ExportSummary, Selection, Split, run
from tugline.types import PluginSpec, Status, TraceKind

_Texts = list[str] | None
_SUM = 1e-6


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which sessions and traces are exported."""

    status: str | None = None
    """Only sessions that ended so, such as completed,timed_out."""
    tag: _Texts = None
    """Only tasks with this tag, key=value; repeatable."""
    min_reward: float | None = None
    """Only sessions that earned at least this."""
    best_of: Count | None = None
    """Only this many of the best sessions of each task."""
    dedupe: bool = False
    """Of sessions of a task that say the same, the first."""
    kind: str | None = None
    """Only traces of these kinds, such as main,subagent."""
    exact_only: bool = False
    """Only traces in the exact context of sampling."""
    max_length: Count | None = None
    """Only traces of at most so many tokens."""

    def select_sessions(self) -> Selection:
        """Parse the conditions of sessions. Raises `UsageError`."""
        return Selection(
            status=_parse_names(self.status, Status, "--status"),
            tags=parse_pairs(self.tag, "--tag"),
            min_reward=self.min_reward,
            dedupe=self.dedupe,
            best_of=self.best_of,
        )

    def select_traces(self) -> TraceFilter:
        """Parse the conditions of traces. Raises `UsageError`."""
        kinds = _parse_names(self.kind, TraceKind, "--kind")
        return TraceFilter(kinds, self.exact_only, self.max_length)


ALL = Filters()
"""Nothing is left out."""


def export(
    form: str,
    /,
    *sessions: Required,
    out: Path,
    given: Annotated[_Texts, Parameter("--with")] = None,
    builder: str | None = None,
    option: _Texts = None,
    which: Filters = ALL,
    split: str | None = None,
    seed: int = 0,
    force: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Write recorded sessions to a file that other tools and trainers read.

    Args:
        form: Format: parquet, sft, trl, verl, slime or yours.
        sessions: Recording files, folders of them, or ids of sessions.
        out: File to write; with --split, a folder.
        given: key=value for the format; repeatable.
        builder: Builder to use (default: the one of each task).
        option: key=value for the builder; repeatable.
        split: Deal tasks to files, such as train=0.9,test=0.1.
        seed: Of --split.
        force: Overwrite what is there.
    """
    plan = Export(
        exporter=make_exporter(PluginSpec(form, parse_options(given, "--with"))),
        out=out,
        selection=which.select_sessions(),
        filter=which.select_traces(),
        builder=parse_builder(builder, option),
        split=_parse_split(split, seed),
        force=force,
    )
    with ExitStack() as stack:
        found = [stack.enter_context(remote.find_recordings(name)) for name in sessions]
        summary = _run(plan, list(dict.fromkeys(path for paths in found for path in paths)))
    print_report(summary, lambda: _show(summary), as_json=as_json)


def _run(plan: Export, paths: list[Path]) -> ExportSummary:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars = {phase: progress.add_task(phase, total=None) for phase in ("reading", "writing")}
        return run(
            plan,
            paths,
            lambda phase, done, total: progress.update(bars[phase], completed=done, total=total),
        )


E = TypeVar("E", bound=StrEnum)


def _parse_names(text: str | None, kind: type[E], flag: str) -> frozenset[E]:
    try:
        return frozenset(kind(word.strip()) for word in text.split(",")) if text else frozenset()
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}; known: {', '.join(kind)}") from error


def _parse_split(text: str | None, seed: int) -> Split | None:
    if text is None:
        return None
    try:
        shares = {k: float(v) for k, v in parse_pairs(text.split(","), "--split").items()}
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
    return Split(shares=shares, seed=seed)


def _show(summary: ExportSummary) -> None:
    numbers = ("tasks", "sessions", "rows", "tokens", "trained")
    rows = (
        (file.path, *(f"{getattr(file, name):,}" for name in numbers))
        for file in summary.files.values()
    )
    left = format_counts(summary.left_out) or "-"
    print_text(
        make_table(("file", *numbers), rows),
        f"{summary.exported} of {summary.recordings} sessions; left out: {left}",
    )
    if summary.rows_left_out:
        print_text(f"of these, rows left out: {format_counts(summary.rows_left_out)}")
    print_text(*summary.errors, stderr=True)
