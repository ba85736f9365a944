"""``tugline generate``: run tasks with a strong model and keep what was accepted as a set for SFT.

The same command resumes. The set is written anew from the recordings each time, so another
``--accept`` costs no model call. Progress goes to stderr, so that stdout has only the report.
"""

import contextlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tugline.cli import up
from tugline.cli.eval import read_tags
from tugline.cli.options import Count, Json, save_report
from tugline.cli.run import run_with_progress
from tugline.cli.task import Paths
from tugline.datasets.files import load_tasks
from tugline.errors import UsageError
from tugline.exports.base import make_exporter
from tugline.exports.pipeline import Export
from tugline.exports.pipeline import run as export
from tugline.protocol import ResultView
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.types import PluginSpec

REPORT = "generation.json"
FILES = {
    "conversations.jsonl": PluginSpec("sft", {"arguments": "object"}),
    "traces.parquet": PluginSpec("parquet"),
}
"""What `tugline sft` reads; traces only where there are token ids and pyarrow."""


class Figures(msgspec.Struct, kw_only=True):
    """Totals of some sessions; those that failed and repeated attempts cost tokens, too."""

    sessions: int = 0
    accepted: int = 0
    failed: int = 0
    """Sessions without a reward."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    """At the prices given."""


class GenerationReport(msgspec.Struct, kw_only=True):
    """Output of ``--json``, and ``generation.json``."""

    tags: dict[str, Figures]
    """By ``name=value`` of the tasks' tags, after those of ``all``."""
    files: dict[str, int] = {}
    """Rows of each file of the set."""


Price = Annotated[float, Parameter(validator=Number(gte=0))]


def generate(
    *paths: Paths,
    out: Path,
    samples: Count | None = None,
    accept: str = "reward>=1",
    price_in: Price = 0.0,
    price_out: Price = 0.0,
    local: up.NodeOptions = up.DEFAULT_NODE,
    as_json: Json = False,
) -> None:
    """Run tasks with a strong model; keep what was accepted as a set for `tugline sft`.

    Args:
        out: Folder of the run; an existing run resumes.
        samples: Sessions per task (default: those of the task).
        accept: Least reward, or least part of it: 'passed>=2'.
        price_in: Price of a million prompt tokens.
        price_out: Price of a million sampled tokens.
    """
    condition = _parse_condition(accept)
    tasks = [replace(task, samples=samples or task.samples) for task in load_tasks(paths)]
    console = Console(stderr=True, highlight=False)
    progress = run_with_progress(tasks, local, out, console)
    report, accepted = _read_run(out, progress.views, read_tags(tasks), condition)
    for one in report.tags.values():
        one.cost = (one.prompt_tokens * price_in + one.sampled_tokens * price_out) / 1e6
    _write_set(out, report, accepted)
    save_report(out / REPORT, report, as_json=as_json)
    if not as_json:
        _print(report)
    if not accepted:
        console.print(f"nothing was accepted; see why with: tugline view {out}")
        sys.exit(1)


def _parse_condition(text: str) -> tuple[str, float]:
    """Return a part of the reward and its least value. Raises `UsageError`."""
    match = re.fullmatch(r"\s*([\w.\-]+)\s*>=\s*(-?\d+\.?\d*)\s*", text)
    if match is None:
        raise UsageError(f"--accept {text!r} must be a name, >= and a number, such as 'reward>=1'")
    return match[1], float(match[2])


def _read_run(
    out: Path,
    views: Sequence[ResultView],
    tags: Mapping[str, Mapping[str, str]],
    condition: tuple[str, float],
) -> tuple[GenerationReport, list[Path]]:
    """Count what the sessions of `views` used; return also the recordings that are accepted."""
    totals, accepted, (part, least) = {"all": Figures()}, [], condition
    figures: dict[str, list[Figures]] = {}
    for view in views:
        names = ["all", *(f"{name}={value}" for name, value in tags[view.task].items())]
        figures[view.session] = [totals.setdefault(name, Figures()) for name in names]
        for one in figures[view.session]:
            one.sessions += 1
            one.failed += view.reward is None
    for path in list_recordings(out):
        recording = read(path)
        own = figures.get(recording.header.session.id, []) if recording.header else []
        reward = recording.result.reward if own and recording.result else None
        values = {**reward.parts, "reward": reward.value} if reward else {}
        taken = values.get(part, -math.inf) >= least
        accepted += [path] * taken
        for one in own:
            one.accepted += taken
            for call in recording.calls:
                one.prompt_tokens += len(call.prompt_ids) + call.unreported_prompt_tokens
                one.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
    return GenerationReport(tags=totals), accepted


def _write_set(out: Path, report: GenerationReport, accepted: Sequence[Path]) -> None:
    """Write each file of the set that has rows; those of an earlier run of the command go."""
    for name, form in FILES.items():
        (out / name).unlink(missing_ok=True)
        with contextlib.suppress(UsageError):  # there is no row for it, or no pyarrow
            plan = Export(exporter=make_exporter(form), out=out / name)
            summary = export(plan, accepted, lambda *_: None)
            report.files[name] = sum(file.rows for file in summary.files.values())


def _print(report: GenerationReport) -> None:
    table = Table("tag", *Figures.__struct_fields__, box=None)
    for name, one in report.tags.items():
        share = f"{one.accepted} ({one.accepted / max(1, one.sessions):.0%})"
        counts = (f"{n:,}" for n in (one.failed, one.prompt_tokens, one.sampled_tokens))
        table.add_row(name, str(one.sessions), share, *counts, f"{one.cost:.4g}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(", ".join(f"{rows} rows in {name}" for name, rows in report.files.items()))
