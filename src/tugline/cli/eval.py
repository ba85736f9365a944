"""``tugline eval``: run tasks without a server, and measure the model on them.

The same command resumes. Progress goes to stderr, so stdout has only the report.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from msgspec.structs import replace
from rich.console import Console

from tugline.cli.local_run import read_tags, run_with_progress
from tugline.cli.node_options import DEFAULT_NODE, NodeOptions
from tugline.cli.options import Count, Json
from tugline.cli.output import make_table, print_text, save_report
from tugline.cli.task import Paths
from tugline.datasets.files import load_tasks
from tugline.launch.prices import describe_cost
from tugline.protocol import RunKind
from tugline.recording.trajectories import read_results
from tugline.trainers import evaluation


def eval(  # noqa: A001 - the name of the command
    *paths: Paths,
    out: Path,
    k: Count = 1,
    earlier: Annotated[Path | None, Parameter("--compare")] = None,
    local: NodeOptions = DEFAULT_NODE,
    as_json: Json = False,
) -> None:
    """Measure a model on tasks: pass@1, pass@k, intervals, and changes.

    Args:
        out: Folder of the run; an existing run resumes.
        k: Sessions per task, for pass@1 to pass@k; may be raised in the same folder.
        earlier: Folder of an earlier run of the same tasks.
    """
    tasks = [replace(task, samples=k) for task in load_tasks(paths, local.task_changes)]
    before = read_results(earlier) if earlier else None
    console = Console(stderr=True, highlight=False)
    done = run_with_progress(tasks, local, out, console, RunKind.EVAL, more_samples=True)
    views = done.views
    scores = evaluation.evaluate(views, k=k, tags=read_tags(tasks))
    change = evaluation.compare(views, before) if before is not None else None
    report = {"evaluation": scores, "change": change, "cost": done.cost}
    save_report(out / "evaluation.json", report, as_json=as_json)
    if as_json:
        return
    rows = [*evaluation.summarize(scores), *evaluation.summarize_change(change)]
    rows += describe_cost(done.cost)
    table = make_table(("", ""), rows)
    table.show_header = False
    print_text(table)
