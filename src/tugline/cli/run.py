"""``tugline run``: run tasks without a server, results in a folder; the same command resumes.

Progress goes to stderr, so that stdout has only the output of ``--json``. Exit code 1 if sessions
failed because of this machine's infrastructure, or if all of them failed.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from tugline.cli import up
from tugline.cli.options import Json
from tugline.cli.output import SessionProgress, print_json
from tugline.cli.task import Paths
from tugline.datasets.files import load_tasks
from tugline.launch.local import run_in_folder
from tugline.launch.server import handle_signals
from tugline.protocol import ResultView
from tugline.types import Boundary, Task

_INFRASTRUCTURE = frozenset({Boundary.INFRASTRUCTURE, Boundary.RUNTIME})


def run_with_progress(
    tasks: Sequence[Task], local: up.NodeOptions, out: Path, console: Console
) -> list[ResultView]:
    """Run what is missing in `out` and report it on the console; `SystemExit` if stopped."""
    settings = up.add_default_engine(local.load())
    progress = SessionProgress(console, sum(task.samples for task in tasks))
    views: list[ResultView] = []

    def add(view: ResultView, _: int) -> None:
        failure = view.failure.message if view.failure else ""
        progress.add(view.session, view.reward, failure)

    async def main() -> None:
        this = asyncio.current_task()
        with progress.bar, handle_signals(lambda: None if this is None else this.cancel()):
            views.extend(await run_in_folder(tasks, settings, out, add))

    try:
        up.keep_running(main(), local.log_file)
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
    if as_json:
        report = {
            "sessions": len(views),
            "status": Counter(view.status for view in views),
            "reward": fmean(rewards) if rewards else None,
            "sampled": sum(view.sampled for view in views),
            "trained": sum(view.trained for view in views),
            "failures": failures,
            "folder": str(out),
        }
        print_json(report)
    if not _INFRASTRUCTURE.isdisjoint(failures) or failures.total() == len(views):
        sys.exit(1)


def _print_failures(console: Console, views: Sequence[ResultView]) -> Counter[Boundary]:
    """Print the number of failures at each boundary, and the first one."""
    failures = [(view.session, view.failure) for view in views if view.failure]
    counts = Counter(failure.boundary for _, failure in failures)
    for boundary, count in counts.most_common():
        session, first = next(pair for pair in failures if pair[1].boundary is boundary)
        console.print(f"[yellow]{count} failed in the {boundary}[/]; {session}: {first.message}")
    return counts
