"""``tugline train``: train a model on tasks; ``--resume`` continues a run.

Progress goes to stderr, so stdout has only the output of ``--json``.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console

from tugline.cli.key_values import parse_options
from tugline.cli.options import DEMO_MODEL, Changes, Json
from tugline.cli.output import save_report
from tugline.cli.training_run import (
    SUMMARY,
    Resume,
    TrainingFolder,
    choose_folder,
    is_follower,
    keep_resumable,
    name_missing_extra,
)
from tugline.launch.prices import describe_cost, make_cost

if TYPE_CHECKING:
    from tugline.trainers.metrics import TrainSummary


def train(
    config: Path,
    /,
    *,
    out: TrainingFolder = None,
    resume: Resume = False,
    server: str | None = None,
    engine: list[str] | None = None,
    changes: Changes = None,
    no_console: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Train a model on tasks, with evaluations on the way; resumable at any point.

    Args:
        config: YAML or TOML file of the run.
        server: URL of the server whose nodes run the sessions, instead of the file's.
        engine: URL of the engine, instead of the file's; repeat for replicas.
        no_console: Do not serve the console of this run.
        dry_run: Check everything and print the plan of the run.
    """
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("train"):
        from tugline.inference.load import check_model_folder  # noqa: PLC0415 - needs the extra
        from tugline.trainers import batches, loop, models, progress, sinks, supervised  # noqa: PLC0415 - needs the extra
        from tugline.trainers.config import CONFIG, read_config  # noqa: PLC0415 - the same

        settings = read_config(
            config,
            DEMO_MODEL,
            server=server,
            engines=engine or (),
            changes=parse_options(changes, "--set"),
        )
        check_model_folder(settings.model or DEMO_MODEL)
        if is_follower():
            if not dry_run:
                with models.open_models(settings) as opened:
                    opened.trainer.follow()
            return
        tasks = batches.TaskBatches(settings, config.absolute().parent)
        tasks.check()
        served = not no_console and settings.server is None
        figures = sinks.make_sinks(settings.metrics, console)
        folder = choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        if dry_run:
            rows = supervised.read_supervised(settings)
            print(batches.describe(settings, tasks, folder, rows=len(rows.samples)))
            return
        command = ["train", str(config), *(f"--set={each}" for each in changes or ())]
        shown = progress.TerminalProgress(console)
        with keep_resumable(folder, shlex.join(command), console), shown.line:
            training = loop.train(settings, tasks, folder, figures, shown, console=served)
            summary = uvloop.run(training)
    save_report(folder / SUMMARY, summary, as_json=as_json)
    _print_end(console, folder, summary)


def _print_end(console: Console, folder: Path, summary: TrainSummary) -> None:
    """Print what the training changed, its cost, and where it is."""
    from tugline.trainers import evaluation  # noqa: PLC0415 - needs the extra

    state = summary.state
    cost = describe_cost(make_cost(state.cost, state.solved) if state.cost else None)
    for name, value in (*evaluation.summarize_change(summary.change), *cost):
        console.print(f"{name or 'held-out tasks'}: {value}", markup=False, soft_wrap=True)
    console.print(f"done after {state.elapsed_s:.0f} s: {folder}")
