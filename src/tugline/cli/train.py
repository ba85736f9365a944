"""``tugline train`` and ``tugline sft``: the same command with ``--resume`` continues a run.

Progress goes to stderr, so that stdout has only the output of ``--json``.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import uvloop
from rich.console import Console

from tugline import log
from tugline.cli.options import INTERRUPTED, Json, Resume, TrainingFolder, name_missing_extra
from tugline.cli.output import save_report
from tugline.errors import UsageError

RUNS = Path("runs")
SUMMARY = "summary.json"


def train(
    config: Path,
    /,
    *,
    out: TrainingFolder = None,
    resume: Resume = False,
    server: str | None = None,
    engine: list[str] | None = None,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Train a model on tasks, with evaluations on the way; resumable at any point.

    Args:
        config: YAML or TOML file of the run.
        server: URL of the server whose nodes run the sessions, in place of the file's.
        engine: Address of the engine, in place of the file's; repeat for replicas.
        dry_run: Check everything and print what would happen.
    """
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("train"):
        from tugline.trainers.batches import TaskBatches, describe  # noqa: PLC0415 - the extra
        from tugline.trainers.config import read_config  # noqa: PLC0415 - the same
        from tugline.trainers.loop import train as run_training  # noqa: PLC0415 - the same
        from tugline.trainers.models import follow  # noqa: PLC0415 - the same
        from tugline.trainers.sinks import make_report, make_sinks  # noqa: PLC0415 - the same
        from tugline.trainers.state import CONFIG  # noqa: PLC0415 - the same

        model = Path(str(files("tugline.demo"))) / "warm_start_model"
        settings = read_config(config, model, server=server, engines=engine or ())
        if int(os.environ.get("RANK", "0")) > 0:  # torchrun's; rank 0 does all but the training
            if not dry_run:
                follow(settings)
            return
        batches = TaskBatches(settings, config.absolute().parent)
        batches.check()
        sinks = make_sinks(settings.metrics, console)
        folder = choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        if dry_run:
            print(describe(settings, batches, folder))
            return
        main = run_training(settings, batches, folder, sinks, make_report(console))
        with keep_resumable(folder, f"train {config}", console):
            summary = uvloop.run(main)
    save_report(folder / SUMMARY, summary, as_json=as_json)
    console.print(f"done after {summary.state.elapsed_s:.0f} s: {folder}")


def sft(
    config: Path, /, *, out: TrainingFolder = None, resume: Resume = False, as_json: Json = False
) -> None:
    """Fine-tune a model on accepted conversations or traces; resumable at any point.

    Args:
        config: YAML or TOML file of the run.
    """
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("train"):
        from tugline.trainers.sft import read_config, train  # noqa: PLC0415 - the extra
        from tugline.trainers.sinks import Sinks, make_sinks  # noqa: PLC0415 - the same
        from tugline.trainers.state import CONFIG, MODEL  # noqa: PLC0415 - the same

        settings = read_config(config)
        if int(os.environ.get("RANK", "0")) > 0:  # torchrun's; rank 0 does all but the training
            train(settings, None, Sinks(()), lambda _: None)
            return
        sinks = make_sinks(settings.metrics, console)
        folder = choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        with keep_resumable(folder, f"sft {config}", console):
            state = train(settings, folder, sinks, console.print)
    save_report(folder / SUMMARY, state, as_json=as_json)
    console.print(f"done after {state.step} updates, {state.elapsed_s:.0f} s: {folder / MODEL}")


def choose_folder(out: Path | None, name: str, marker: str, *, resume: bool) -> Path:
    """Return the folder of the run. Raises `UsageError` if a run is there, or none to resume."""
    if resume:
        runs = sorted(file.parent for file in RUNS.glob(f"{name}-*/{marker}"))
        folder = out or (runs[-1] if runs else None)
        if folder is None or not (folder / marker).exists():
            msg = f"there is no run of {name} to resume in {folder or RUNS}; leave out --resume"
            raise UsageError(msg)
        return folder
    if out is not None and (out / marker).exists():
        msg = f"{out} holds a run already; add --resume to continue it, or choose another --out"
        raise UsageError(msg)
    return out or RUNS / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


@contextlib.contextmanager
def keep_resumable(folder: Path, command: str, console: Console) -> Iterator[None]:
    """Make the folder of a run and log to it; if the run is stopped, print how to resume it."""
    folder.mkdir(parents=True, exist_ok=True)
    log.configure(level="info", path=folder / "log.jsonl")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"stopped; resume with: tugline {command} --resume --out {folder}")
        sys.exit(INTERRUPTED)
