"""``tugline export``: write recorded sessions to files for other tools and trainers."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tugline.cli.key_values import parse_builder, parse_options, parse_pairs
from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote, Required
from tugline.cli.output import format_counts, make_table, print_report, print_text, show_progress
from tugline.errors import UsageError
from tugline.exports.base import TraceFilter, make_exporter
from tugline.exports.pipeline import Export, ExportSummary, Selection, Split, run
from tugline.schema import copy_fields
from tugline.types import PluginSpec, Status, TraceKind

_Texts = list[str] | None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Filters:
    """Filters of sessions and traces."""

    held_out: bool = False
    """Include sessions of the held-out tasks of a training run."""
    status: list[Status] | None = None
    """Only sessions with this final status; repeatable."""
    tag: _Texts = None
    """Only tasks with this tag, key=value; repeatable."""
    min_reward: float | None = None
    """Only sessions with at least this reward."""
    best_of: Count | None = None
    """At most this number of sessions per task: those with the highest rewards."""
    dedupe: bool = False
    """Only one of several sessions of a task with the same conversation."""
    kind: list[TraceKind] | None = None
    """Only traces of this kind; repeatable."""
    exact_only: bool = False
    """Only traces whose context is exactly the sampled one."""
    max_length: Count | None = None
    """Only traces with at most this number of tokens."""

    def select_sessions(self) -> Selection:
        """Parse the conditions of sessions. Raises `UsageError`."""
        status = frozenset(self.status or ())
        tags = parse_pairs(self.tag, "--tag")
        return copy_fields(Selection, self, status=status, tags=tags)


ALL = Filters()
"""Filters that accept all sessions and traces."""


def export(
    form: str,
    /,
    *sessions: Required,
    out: Path,
    given: Annotated[_Texts, Parameter("--with")] = None,
    builder: str | None = None,
    option: _Texts = None,
    filters: Filters = ALL,
    split: str | None = None,
    seed: int = 0,
    force: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Write recorded sessions to a file for other tools and trainers.

    Args:
        form: Format: parquet, sft, atif, trl, verl, slime or a plug-in.
        sessions: Recording files, folders of them, or ids of sessions.
        out: File to write; with --split, a folder. A name with .jsonl is written as JSON lines.
        given: key=value option of the format; repeatable.
        builder: Builder to use (default: the builder of each task).
        option: key=value option of the builder; repeatable.
        split: Distribute problems over files, such as train=0.9,test=0.1.
        seed: Seed of --split.
        force: Overwrite existing files.
    """
    plan = Export(
        exporter=make_exporter(PluginSpec(form, parse_options(given, "--with"))),
        out=out,
        selection=filters.select_sessions(),
        filter=TraceFilter(frozenset(filters.kind or ()), filters.exact_only, filters.max_length),
        builder=parse_builder(builder, option),
        split=_parse_split(split, seed),
        force=force,
    )
    with ExitStack() as stack:
        lists = [stack.enter_context(remote.find_recordings(name)) for name in sessions]
        summary = _run(plan, list(dict.fromkeys(path for paths in lists for path in paths)))
    print_report(summary, lambda: _show(summary), as_json=as_json)


def _run(plan: Export, paths: list[Path]) -> ExportSummary:
    with show_progress("reading", "sessions", len(paths)) as progress:

        def show(phase: str, done: int, total: int) -> None:
            progress.set_phase(phase, "sessions", total)
            progress.update(done)

        return run(plan, paths, show)


# --------------------------------------------------------------------------- values of options
def _parse_split(text: str | None, seed: int) -> Split | None:
    if text is None:
        return None
    try:
        shares = {k: float(v) for k, v in parse_pairs(text.split(","), "--split").items()}
    except ValueError as error:
        msg = f"--split is {text!r}, must be names with shares, such as train=0.9,test=0.1"
        raise UsageError(msg) from error
    valid = all(share > 0 for share in shares.values()) and abs(sum(shares.values()) - 1) < 1e-6
    if not valid or len(shares) <= text.count(","):
        msg = f"--split is {text!r}: shares must be above 0 and add up to 1, names must be unique"
        raise UsageError(msg)
    if any(not name.replace("-", "_").isidentifier() for name in shares):
        msg = f"--split is {text!r}: names must consist of letters, digits, _ and -"
        raise UsageError(msg)
    return Split(shares=shares, seed=seed)


# --------------------------------------------------------------------------- on the terminal
def _show(summary: ExportSummary) -> None:
    numbers = ("tasks", "sessions", "rows", "tokens", "trained")
    rows = (
        (file.path, *(f"{getattr(file, name):,}" for name in numbers))
        for file in summary.files.values()
    )
    skipped = format_counts(summary.left_out) or "-"
    print_text(
        make_table(("file", *numbers[:-1], "trainable"), rows),
        f"{summary.exported} of {summary.recordings} sessions; left out: {skipped}",
    )
    if summary.rows_left_out:
        print_text(f"of these, rows left out: {format_counts(summary.rows_left_out)}")
        print_text(*summary.hints)
    print_text(*summary.errors, stderr=True)
