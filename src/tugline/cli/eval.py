"""``tugline eval``: measure a model on tasks, and what changed since an earlier run.

The same command resumes. Progress goes to stderr, so that stdout has only the report.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec.structs import replace
from rich.console import Console

from tugline.cli import up
from tugline.cli.options import Count, Json
from tugline.cli.output import make_table, print_text, save_report
from tugline.cli.run import run_with_progress
from tugline.cli.task import Paths
from tugline.datasets.base import INSTANCE, SPLIT, TASKSET
from tugline.datasets.files import load_tasks
from tugline.trainers.evaluation import (
    Comparison,
    Evaluation,
    compare,
    evaluate,
    format_estimate,
    read_attempts,
    summarize,
    to_attempt,
)
from tugline.types import Task

REPORT = "evaluation.json"


class EvaluationReport(msgspec.Struct, frozen=True):
    """Output of ``--json``, and ``evaluation.json``."""

    evaluation: Evaluation
    change: Comparison | None
    """With ``--compare``: now minus earlier."""


def eval(  # noqa: A001 - the name of the command
    *paths: Paths,
    out: Path,
    k: Count = 1,
    earlier: Annotated[Path | None, Parameter("--compare")] = None,
    local: up.NodeOptions = up.DEFAULT_NODE,
    as_json: Json = False,
) -> None:
    """Measure a model on tasks: pass@1, pass@k, intervals, and what changed.

    Args:
        out: Folder of the run; an existing run resumes.
        k: Sessions per task, for pass@1 to pass@k.
        earlier: Folder of an earlier run of the same tasks.
    """
    tasks = [replace(task, samples=k) for task in load_tasks(paths)]
    before = read_attempts(earlier) if earlier else None
    console = Console(stderr=True, highlight=False)
    views = run_with_progress(tasks, local, out, console)
    attempts = [to_attempt(view) for view in views]
    report = EvaluationReport(
        evaluate(attempts, k=k, tags=read_tags(tasks)),
        compare(attempts, before) if before is not None else None,
    )
    save_report(out / REPORT, report, as_json=as_json)
    if not as_json:
        _print(report)


def read_tags(tasks: list[Task]) -> Mapping[str, Mapping[str, str]]:
    """Return the tags of each task, but for those that name it."""
    own = {INSTANCE, SPLIT, TASKSET}
    return {
        task.id: {name: value for name, value in task.tags.items() if name not in own}
        for task in tasks
    }


def _print(report: EvaluationReport) -> None:
    rows = [*summarize(report.evaluation)]
    if report.change is not None:
        change = report.change
        rows.append(("change of pass@1", format_estimate(change.difference)))
        rows.append(("", f"{change.better} tasks better, {change.worse} worse"))
    table = make_table(("", ""), rows)
    table.show_header = False
    print_text(table)
