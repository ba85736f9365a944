"""``tugline run``: run tasks without a server, results in a folder; the same command resumes.

Progress goes to stderr, so that stdout has only the output of ``--json``. Exit code 1 if sessions
failed because of this machine's infrastructure, or if all of them failed.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from tugline.cli import up
from tugline.cli.options import Json
from tugline.cli.output import make_bar, print_json
from tugline.cli.task import Paths
from tugline.datasets.files import load_tasks
from tugline.launch.local import run_in_folder
from tugline.launch.server import handle_signals
from tugline.protocol import ResultView
from tugline.types import Boundary, Task

_REPORT_EVERY_S = 10.0
"""Between two lines, without a terminal."""
_INFRASTRUCTURE = frozenset({Boundary.INFRASTRUCTURE, Boundary.RUNTIME})


class RunProgress:
    """The results so far, and how they are reported."""

    def __init__(self, console: Console) -> None:
        self.views: list[ResultView] = []
        self._console = console
        summary = TextColumn("{task.fields[summary]}")
        self.bar = make_bar(console, TimeRemainingColumn(), summary, transient=False)
        self._reported = 0.0

    def add(self, view: ResultView, total: int) -> None:
        """Report one more result."""
        self.views.append(view)
        if not self.bar.tasks:
            self.bar.add_task("sessions", total=total, summary="")
        summary = self.summarize()
        self.bar.update(self.bar.task_ids[0], completed=len(self.views), summary=summary)
        now = time.monotonic()
        due = now - self._reported >= _REPORT_EVERY_S or len(self.views) == total
        if due and not self._console.is_terminal:
            self._reported = now
            self._console.print(f"{len(self.views)} of {total} sessions, {summary}")

    def mean_reward(self) -> float | None:
        """Mean over the sessions with a reward."""
        rewards = [view.reward for view in self.views if view.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def summarize(self) -> str:
        """Mean reward and failures in one phrase."""
        mean = self.mean_reward()
        failed = sum(view.failure is not None for view in self.views)
        text = "no reward yet" if mean is None else f"mean reward {mean:.3f}"
        return f"{text}, {failed} failed" if failed else text

    def to_dict(self) -> dict[str, Any]:
        """The totals, for ``--json``."""
        failures = Counter(view.failure.boundary for view in self.views if view.failure)
        return {
            "sessions": len(self.views),
            "status": Counter(view.status.value for view in self.views),
            "reward": self.mean_reward(),
            "sampled": sum(view.sampled for view in self.views),
            "trained": sum(view.trained for view in self.views),
            "failures": {boundary.value: count for boundary, count in failures.items()},
        }


def run_with_progress(
    tasks: Sequence[Task], local: up.NodeOptions, out: Path, console: Console
) -> RunProgress:
    """Run what is missing in `out` and report it on the console; `SystemExit` if stopped."""
    settings = up.add_default_engine(local.load())
    progress = RunProgress(console)

    async def main() -> None:
        this = asyncio.current_task()
        with progress.bar, handle_signals(lambda: None if this is None else this.cancel()):
            await run_in_folder(tasks, settings, out, progress.add)

    try:
        up.keep_running(main(), local.log_file)
    except SystemExit:
        console.print(f"stopped; the same command resumes in {out}")
        raise
    return progress


def run(
    *paths: Paths, out: Path, local: up.NodeOptions = up.DEFAULT_NODE, as_json: Json = False
) -> None:
    """Run tasks on this machine and keep every result in a folder.

    Args:
        out: Folder of the run; an existing run resumes.
    """
    console = Console(stderr=True, highlight=False)
    progress = run_with_progress(load_tasks(paths), local, out, console)
    console.print(f"{len(progress.views)} sessions, {progress.summarize()}: {out}/results.jsonl")
    _print_failures(console, progress.views)
    if as_json:
        print_json({**progress.to_dict(), "folder": str(out)})
    failed = [view.failure.boundary for view in progress.views if view.failure]
    if not _INFRASTRUCTURE.isdisjoint(failed) or len(failed) == len(progress.views):
        sys.exit(1)


def _print_failures(console: Console, views: Sequence[ResultView]) -> None:
    """Print the number of failures at each boundary, and the first one."""
    failures = [(view.session, view.failure) for view in views if view.failure]
    counts = Counter(failure.boundary for _, failure in failures)
    for boundary, count in counts.most_common():
        session, first = next(pair for pair in failures if pair[1].boundary is boundary)
        console.print(
            f"[yellow]{count} failed in the {boundary}[/]; {session}: {first.message}",
            soft_wrap=True,
        )
