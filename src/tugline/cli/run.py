"""``tugline run``, ``eval`` and ``generate``: run tasks without a server, with a results folder.

The same command resumes. Progress goes to stderr, so stdout has only the report. `run` exits with 1
if a session failed due to this machine's infrastructure, or if all sessions failed. `generate`
rewrites its files from the recordings, so a new ``--accept`` needs no model calls.
"""

import asyncio
import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec.structs import replace
from rich.console import Console

from tugline.aio import handle_signals
from tugline.cli import up
from tugline.cli.options import Count, Json, NotNegative
from tugline.cli.output import SessionProgress, make_table, print_report, print_text, save_report
from tugline.cli.task import Paths
from tugline.datasets.base import INSTANCE, SPLIT, TASKSET
from tugline.datasets.files import load_tasks
from tugline.errors import UsageError
from tugline.exports.base import make_exporter
from tugline.exports.pipeline import Export
from tugline.exports.pipeline import run as export
from tugline.launch.local import run_in_folder
from tugline.protocol import ResultView
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.recording.trajectories import read_results
from tugline.trainers import evaluation
from tugline.types import Boundary, PluginSpec, Task

FILES = {
    "conversations.jsonl": PluginSpec("sft", {"arguments": "object"}),
    "traces.parquet": PluginSpec("parquet"),
}
"""Files for `tugline sft`; traces need token ids and pyarrow."""
_INFRASTRUCTURE = frozenset({Boundary.INFRASTRUCTURE, Boundary.RUNTIME})


def run_with_progress(
    tasks: Sequence[Task],
    local: up.NodeOptions,
    out: Path,
    console: Console,
    *,
    more_samples: bool = False,
) -> list[ResultView]:
    """Run sessions without a result in `out`, with progress. Raises `SystemExit` if stopped."""
    settings = up.add_default_engine(local.load())
    progress = SessionProgress(console, sum(task.samples for task in tasks))
    views: list[ResultView] = []

    def add(view: ResultView, _: int) -> None:
        failure = view.failure.message if view.failure else ""
        progress.add(view.session, view.reward, failure)

    async def main() -> None:
        this = asyncio.current_task()
        with progress.bar, handle_signals(lambda: None if this is None else this.cancel()):
            views.extend(await run_in_folder(tasks, settings, out, add, more_samples=more_samples))

    try:
        up.keep_running(main, local.log_file)
    except SystemExit:
        console.print(f"stopped; the same command resumes in {out}")
        raise
    return views


def run(
    *paths: Paths, out: Path, local: up.NodeOptions = up.DEFAULT_NODE, as_json: Json = False
) -> None:
    """Run tasks on this machine and keep every result in a folder.

    Args:
        out: Folder of the run; an existing run resumes.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    views = run_with_progress(load_tasks(paths), local, out, console)
    console.print(f"results: {out}/results.jsonl")
    failures = _print_failures(console, views)
    rewards = [view.reward for view in views if view.reward is not None]
    report = {
        "sessions": len(views),
        "status": Counter(view.status for view in views),
        "reward": fmean(rewards) if rewards else None,
        "sampled": sum(view.sampled for view in views),
        "trained": sum(view.trained for view in views),
        "failures": failures,
        "folder": str(out),
    }
    failed = not _INFRASTRUCTURE.isdisjoint(failures) or failures.total() == len(views)
    print_report(report, lambda: None, as_json=as_json, failed=failed)


def _print_failures(console: Console, views: Sequence[ResultView]) -> Counter[Boundary]:
    """Print the number of failures at each boundary, with the first failure."""
    failures = [(view.session, view.failure) for view in views if view.failure]
    counts = Counter(failure.boundary for _, failure in failures)
    for boundary, count in counts.most_common():
        session, first = next(pair for pair in failures if pair[1].boundary is boundary)
        console.print(f"[yellow]{count} failed in the {boundary}[/]; {session}: {first.message}")
    return counts


def eval(  # noqa: A001 - the name of the command
    *paths: Paths,
    out: Path,
    k: Count = 1,
    earlier: Annotated[Path | None, Parameter("--compare")] = None,
    local: up.NodeOptions = up.DEFAULT_NODE,
    as_json: Json = False,
) -> None:
    """Measure a model on tasks: pass@1, pass@k, intervals, and changes.

    Args:
        out: Folder of the run; an existing run resumes.
        k: Sessions per task, for pass@1 to pass@k; may be raised in the same folder.
        earlier: Folder of an earlier run of the same tasks.
    """
    tasks = [replace(task, samples=k) for task in load_tasks(paths)]
    before = read_results(earlier) if earlier else None
    console = Console(stderr=True, highlight=False)
    views = run_with_progress(tasks, local, out, console, more_samples=True)
    scores = evaluation.evaluate(views, k=k, tags=_read_tags(tasks))
    change = evaluation.compare(views, before) if before is not None else None
    save_report(out / "evaluation.json", {"evaluation": scores, "change": change}, as_json=as_json)
    if as_json:
        return
    rows = [*evaluation.summarize(scores)]
    if change is not None:
        rows.append(("change of pass@1", evaluation.format_estimate(change.difference)))
        rows.append(("", f"{change.better} tasks better, {change.worse} worse"))
    table = make_table(("", ""), rows)
    table.show_header = False
    print_text(table)


def _read_tags(tasks: list[Task]) -> Mapping[str, Mapping[str, str]]:
    """Return the tags of each task, except those that identify it."""
    own = {INSTANCE, SPLIT, TASKSET}
    return {
        task.id: {name: value for name, value in task.tags.items() if name not in own}
        for task in tasks
    }


# --------------------------------------------------------------------------- sets for `tugline sft`
class Figures(msgspec.Struct, kw_only=True):
    """Totals of sessions; the tokens include failed sessions and repeated attempts."""

    sessions: int = 0
    accepted: int = 0
    failed: int = 0
    """Sessions without a reward."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    """Cost at the prices of the options."""


def generate(
    *paths: Paths,
    out: Path,
    samples: Count | None = None,
    accept: str = "reward>=1",
    price_in: NotNegative = 0.0,
    price_out: NotNegative = 0.0,
    local: up.NodeOptions = up.DEFAULT_NODE,
    as_json: Json = False,
) -> None:
    """Run tasks with a strong model; keep accepted sessions for `tugline sft`.

    Args:
        out: Folder of the run; an existing run resumes.
        samples: Sessions per task (default: samples of the task).
        accept: Minimum of the reward, or of a part of it: 'passed>=2'.
        price_in: Price of a million prompt tokens.
        price_out: Price of a million sampled tokens.
    """
    condition = _parse_condition(accept)
    tasks = [replace(task, samples=samples or task.samples) for task in load_tasks(paths)]
    console = Console(stderr=True, highlight=False)
    views = run_with_progress(tasks, local, out, console)
    totals, accepted = _read_run(out, views, _read_tags(tasks), condition)
    for total in totals.values():
        total.cost = (total.prompt_tokens * price_in + total.sampled_tokens * price_out) / 1e6
    rows = _write_set(out, accepted)
    save_report(out / "generation.json", {"tags": totals, "files": rows}, as_json=as_json)
    if not as_json:
        _print_figures(totals, rows)
    if not accepted:
        console.print(f"no sessions were accepted; see why with: tugline view {out}")
        sys.exit(1)


def _parse_condition(text: str) -> tuple[str, float]:
    """Return the name of a part of the reward, and its minimum. Raises `UsageError`."""
    match = re.fullmatch(r"\s*([\w.\-]+)\s*>=\s*(-?\d+\.?\d*)\s*", text)
    if match is None:
        raise UsageError(f"--accept is {text!r}, must be NAME>=NUMBER, such as 'reward>=1'")
    return match[1], float(match[2])


def _read_run(
    out: Path,
    views: Sequence[ResultView],
    tags: Mapping[str, Mapping[str, str]],
    condition: tuple[str, float],
) -> tuple[dict[str, Figures], list[Path]]:
    """Return totals of `views` by tag, and the accepted recordings."""
    totals = {"all": Figures()}
    accepted = []
    part, minimum = condition
    figures: dict[str, list[Figures]] = {}
    for view in views:
        names = ["all", *(f"{name}={value}" for name, value in tags[view.task].items())]
        figures[view.session] = [totals.setdefault(name, Figures()) for name in names]
        for total in figures[view.session]:
            total.sessions += 1
            total.failed += view.reward is None
    for path in list_recordings(out):
        recording = read(path)
        own = figures.get(recording.header.session.id, []) if recording.header else []
        reward = recording.result.reward if own and recording.result else None
        values = {**reward.parts, "reward": reward.value} if reward else {}
        is_accepted = values.get(part, -math.inf) >= minimum
        accepted += [path] * is_accepted
        for total in own:
            total.accepted += is_accepted
            for call in recording.calls:
                total.prompt_tokens += len(call.prompt_ids) + call.unreported_prompt_tokens
                total.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
    return totals, accepted


def _write_set(out: Path, accepted: Sequence[Path]) -> dict[str, int]:
    """Write the files that have rows, replacing earlier files; return the numbers of rows."""
    rows = {}
    for name, form in FILES.items():
        (out / name).unlink(missing_ok=True)
        with contextlib.suppress(UsageError):  # the file has no rows, or pyarrow is missing
            plan = Export(exporter=make_exporter(form), out=out / name)
            summary = export(plan, accepted, lambda *_: None)
            rows[name] = sum(file.rows for file in summary.files.values())
    return rows


def _print_figures(totals: Mapping[str, Figures], rows: Mapping[str, int]) -> None:
    lines = (
        (
            name,
            total.sessions,
            f"{total.accepted} ({total.accepted / max(1, total.sessions):.0%})",
            *(f"{n:,}" for n in (total.failed, total.prompt_tokens, total.sampled_tokens)),
            f"{total.cost:.4g}",
        )
        for name, total in totals.items()
    )
    print_text(
        make_table(("tag", *Figures.__struct_fields__), lines),
        ", ".join(f"{count} rows in {name}" for name, count in rows.items()),
    )
