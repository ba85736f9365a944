"""A run of tasks on this machine, without a server, with its results in a folder."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace
from rich.console import Console

from tugline.aio import handle_signals
from tugline.cli.node_options import NodeOptions, add_default_engine
from tugline.cli.process import keep_running
from tugline.config import NO_CHANGES
from tugline.datasets.base import SPLIT, TASKSET
from tugline.launch.prices import Cost, Prices, measure_cost
from tugline.launch.progress import SessionProgress
from tugline.launch.run import run_in_folder
from tugline.protocol import ResultView, RunKind
from tugline.types import INSTANCE, Task


class LocalRun(NamedTuple):
    """Results of a run, and its prices."""

    views: list[ResultView]
    prices: Prices

    @property
    def cost(self) -> Cost | None:
        """Its cost; None without prices."""
        return measure_cost(self.views, self.prices)


def run_with_progress(
    tasks: Sequence[Task],
    local: NodeOptions,
    out: Path,
    console: Console,
    kind: RunKind,
    *,
    more_samples: bool = False,
    prices: Mapping[str, float] = NO_CHANGES,
) -> LocalRun:
    """Run sessions without a result in `out`, with progress. Raises `SystemExit` if stopped.

    `prices` replace those of the settings.
    """
    settings = add_default_engine(local.load(task_sets=True))
    settings = replace(settings, prices=replace(settings.prices, **prices))
    progress = SessionProgress(console, sum(task.samples for task in tasks))
    views: list[ResultView] = []

    def add(view: ResultView, *, new: bool) -> None:
        failure = view.failure.message if view.failure else ""
        progress.add(view.session, view.reward, failure, new=new)

    async def main() -> None:
        this = asyncio.current_task()
        with progress.bar, handle_signals(lambda: None if this is None else this.cancel()):
            running = run_in_folder(tasks, settings, out, add, more_samples=more_samples, kind=kind)
            views.extend(await running)

    try:
        keep_running(main, local.log_file)
    except SystemExit:
        console.print(f"stopped; the same command resumes in {out}")
        raise
    return LocalRun(views, settings.prices)


def read_tags(tasks: list[Task]) -> Mapping[str, Mapping[str, str]]:
    """Return the tags of each task, except those that identify it."""
    own = {INSTANCE, SPLIT, TASKSET}
    return {
        task.id: {name: value for name, value in task.tags.items() if name not in own}
        for task in tasks
    }
