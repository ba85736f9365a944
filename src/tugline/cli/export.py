"""``tugline export`` and ``rebuild``: write recorded sessions to files for trainers.

`rebuild` builds byte-identical trajectories; the exit code is 1 if one could not be built.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from tugline.cli.options import DEFAULT_SERVER, Count, Json, Remote, Required
from tugline.cli.output import format_counts, make_table, print_report, print_text
from tugline.errors import UsageError
from tugline.exports.base import TraceFilter, make_exporter
from tugline.exports.pipeline import Export, ExportSummary, Selection, Split, run
from tugline.recording.trajectories import INDEX, Index, rebuild_all
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
        tags = _parse_pairs(self.tag, "--tag")
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
        exporter=make_exporter(PluginSpec(form, _parse_options(given, "--with"))),
        out=out,
        selection=filters.select_sessions(),
        filter=TraceFilter(frozenset(filters.kind or ()), filters.exact_only, filters.max_length),
        builder=_parse_builder(builder, option),
        split=_parse_split(split, seed),
        force=force,
    )
    with ExitStack() as stack:
        lists = [stack.enter_context(remote.find_recordings(name)) for name in sessions]
        summary = _run(plan, list(dict.fromkeys(path for paths in lists for path in paths)))
    print_report(summary, lambda: _show(summary), as_json=as_json)


def _make_progress() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _run(plan: Export, paths: list[Path]) -> ExportSummary:
    with _make_progress() as progress:
        bars = {phase: progress.add_task(phase, total=None) for phase in ("reading", "writing")}
        return run(
            plan,
            paths,
            lambda phase, done, total: progress.update(bars[phase], completed=done, total=total),
        )


def rebuild(
    session: str,
    /,
    *,
    out: Path,
    builder: str | None = None,
    option: list[str] | None = None,
    salvage: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Build trajectories from recorded sessions alone, for a trainer to load.

    Args:
        session: A recording file, a folder of them, or the id of a session.
        out: New folder for <session>.traj and index.json.
        builder: Builder to use (default: the builder of each task).
        option: key=value option of the builder; repeatable.
        salvage: Build from the part of a damaged file before the damage.
    """
    root = Path(session)
    spec = _parse_builder(builder, option)
    with remote.find_recordings(session) as paths, _make_progress() as progress:
        bar = progress.add_task("rebuilding", total=len(paths))
        index = rebuild_all(
            paths,
            root if root.is_dir() else paths[0].parent,
            out,
            spec,
            salvage=salvage,
            on_file=lambda: progress.advance(bar),
        )
    failed = any(entry.error for entry in index.entries)
    print_report(index, lambda: _show_index(index, out), as_json=as_json, failed=failed)


# --------------------------------------------------------------------------- values of options
def _parse_split(text: str | None, seed: int) -> Split | None:
    if text is None:
        return None
    try:
        shares = {k: float(v) for k, v in _parse_pairs(text.split(","), "--split").items()}
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


def _parse_builder(name: str | None, options: Iterable[str] | None) -> PluginSpec | None:
    """Parse ``--builder`` and its ``--option key=value``."""
    given = _parse_options(options, "--option")
    if given and name is None:
        msg = f"--option {next(iter(options or ()))} requires --builder"
        raise UsageError(msg)
    return None if name is None else PluginSpec(name, given)


def _parse_options(texts: Iterable[str] | None, flag: str) -> dict[str, Any]:
    """Parse ``key=value`` options of a plug-in; a value is JSON if valid, else text."""
    return {key: _parse_value(text) for key, text in _parse_pairs(texts, flag).items()}


def _parse_pairs(texts: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Parse ``key=value`` texts of a repeatable flag. Raises `UsageError`."""
    pairs = {}
    for text in texts or ():
        key, equals, pairs[key] = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} is {text!r}, must be key=value")
    return pairs


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


# --------------------------------------------------------------------------- on the terminal
def _show(summary: ExportSummary) -> None:
    numbers = ("tasks", "sessions", "rows", "tokens", "trained")
    rows = (
        (file.path, *(f"{getattr(file, name):,}" for name in numbers))
        for file in summary.files.values()
    )
    skipped = format_counts(summary.left_out) or "-"
    print_text(
        make_table(("file", *numbers), rows),
        f"{summary.exported} of {summary.recordings} sessions; left out: {skipped}",
    )
    if summary.rows_left_out:
        print_text(f"of these, rows left out: {format_counts(summary.rows_left_out)}")
    print_text(*summary.errors, stderr=True)


def _show_index(index: Index, out: Path) -> None:
    built = [entry for entry in index.entries if entry.file]
    for entry in index.entries:
        if entry.error or entry.note:
            print_text(f"{entry.recording}: {entry.error or entry.note}")
    print_text(
        f"{len(built)} of {len(index.entries)} recordings to {out}/{INDEX}: "
        f"{sum(entry.traces for entry in built)} traces, "
        f"{sum(entry.tokens for entry in built)} tokens, "
        f"{sum(entry.ledger.trained for entry in built)} of "
        f"{sum(entry.ledger.sampled for entry in built)} sampled tokens trained"
    )
