"""``tugline run``: tasks in, results in a folder, no server needed; the same command goes on.

Progress goes to stderr, so that ``--json`` on stdout stays clean. Exit code 1 says that sessions
failed for reasons that are nobody's but this machine's, or that none got through.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tugline.cli.task import Paths
from tugline.cli.up import (
    ConfigFile,
    Engines,
    LogFile,
    Model,
    Renderer,
    Slots,
    Tokenizer,
    engine_flags,
    keep_running,
    with_an_engine,
)
from tugline.datasets.files import load
from tugline.launch.local import run as run_all
from tugline.launch.settings import load_settings
from tugline.protocol import ResultView
from tugline.types import Boundary

_QUIET_S = 10.0
"""Without a terminal, seconds between two lines."""
_OURS = frozenset({Boundary.INFRASTRUCTURE, Boundary.RUNTIME})


@dataclass
class Tally:
    """The results so far, and how they are told."""

    console: Console
    bar: Progress
    views: list[ResultView] = field(default_factory=list)
    spoken: float = 0.0

    def add(self, view: ResultView, total: int) -> None:
        """One more result."""
        self.views.append(view)
        if not self.bar.tasks:
            self.bar.add_task("sessions", total=total, said="")
        self.bar.update(self.bar.task_ids[0], completed=len(self.views), said=self.line())
        quiet = time.monotonic() - self.spoken < _QUIET_S and len(self.views) < total
        if not self.console.is_terminal and not quiet:
            self.spoken = time.monotonic()
            self.console.print(f"{len(self.views)} of {total} sessions, {self.line()}")

    def line(self) -> str:
        """What came of them, in short."""
        rewards = [view.reward for view in self.views if view.reward is not None]
        mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward yet"
        failed = sum(view.failure is not None for view in self.views)
        return f"{mean}, {failed} failed" if failed else mean

    def told(self) -> dict[str, Any]:
        """As plain data."""
        rewards = [view.reward for view in self.views if view.reward is not None]
        failures = Counter(view.failure.boundary for view in self.views if view.failure)
        return {
            "sessions": len(self.views),
            "status": Counter(view.status.value for view in self.views),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "sampled": sum(view.sampled for view in self.views),
            "trained": sum(view.trained for view in self.views),
            "failures": {boundary.value: count for boundary, count in failures.items()},
        }


def run(  # noqa: PLR0913 - each is a flag
    paths: Paths,
    *,
    out: Annotated[Path, typer.Option(help="Folder of the run; the same one goes on.")],
    config: ConfigFile = None,
    engine: Engines = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    renderer: Renderer = None,
    slots: Slots = None,
    log_file: LogFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")
    ] = False,
) -> None:
    """Run tasks on this machine and keep every result in a folder."""
    told = load_settings(
        config,
        server={},
        node={"slots": slots},
        engine=engine_flags(engine, model, tokenizer, renderer),
    )
    tasks, told = load(paths), with_an_engine(told)
    console = Console(stderr=True, highlight=False)
    tally = Tally(console, _bar(console))

    async def main() -> None:
        with tally.bar:
            await run_all(tasks, told, out, tally.add)

    try:
        keep_running(main(), log_file)
    except typer.Exit:
        console.print(f"stopped; the same command goes on in {out}")
        raise
    console.print(f"{len(tally.views)} sessions, {tally.line()}: {out}/results.jsonl")
    _say_failures(console, tally.views)
    if as_json:
        typer.echo(msgspec.json.encode({**tally.told(), "folder": str(out)}))
    failed = [view.failure.boundary for view in tally.views if view.failure]
    if any(boundary in _OURS for boundary in failed) or len(failed) == len(tally.views):
        raise typer.Exit(1)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _say_failures(console: Console, views: Sequence[ResultView]) -> None:
    """The first failure at each boundary, for there may be thousands."""
    failures = [(view.session, view.failure) for view in views if view.failure]
    counts = Counter(failure.boundary for _, failure in failures)
    for boundary, count in counts.most_common():
        session, first = next(one for one in failures if one[1].boundary is boundary)
        console.print(
            f"[yellow]{count} failed in the {boundary}[/]; {session}: {first.message}",
            soft_wrap=True,
        )
