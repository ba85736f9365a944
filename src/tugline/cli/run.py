"""``tugline run``: run tasks without a server, with a results folder.

The same command resumes. Progress goes to stderr, so stdout has only the report. The exit code is 1
if a session failed due to this machine's infrastructure, or if all sessions failed.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from tugline.cli.local_run import run_with_progress
from tugline.cli.node_options import DEFAULT_NODE, NodeOptions
from tugline.cli.options import Json
from tugline.cli.output import print_report
from tugline.cli.task import Paths
from tugline.datasets.files import load_tasks
from tugline.launch.prices import describe_cost
from tugline.protocol import ResultView, RunKind
from tugline.types import Boundary

_INFRASTRUCTURE = frozenset({Boundary.INFRASTRUCTURE, Boundary.RUNTIME})


def run(*paths: Paths, out: Path, local: NodeOptions = DEFAULT_NODE, as_json: Json = False) -> None:
    """Run tasks on this machine and keep every result in a folder.

    Args:
        out: Folder of the run; an existing run resumes.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tasks = load_tasks(paths, local.task_changes)
    done = run_with_progress(tasks, local, out, console, RunKind.RUN)
    views = done.views
    console.print(f"results: {out}/results.jsonl")
    failures = _print_failures(console, views)
    for name, text in describe_cost(done.cost):
        console.print(f"{name}: {text}")
    rewards = [view.reward for view in views if view.reward is not None]
    report = {
        "sessions": len(views),
        "status": Counter(view.status for view in views),
        "reward": fmean(rewards) if rewards else None,
        "sampled": sum(view.sampled for view in views),
        "trained": sum(view.trained for view in views),
        "failures": failures,
        "cost": done.cost,
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
