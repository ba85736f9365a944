"""``tugline train``, ``sft`` and ``demo``: train models; ``--resume`` continues a run.

Progress goes to stderr, so stdout has only the output of ``--json``.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import uvloop
from cyclopts import Parameter
from rich.console import Console

from tugline import log
from tugline.cli.options import DEMO_MODEL, INTERRUPTED, Json
from tugline.cli.output import print_json, save_report
from tugline.errors import UsageError

RUNS = Path("runs")
SUMMARY = "summary.json"

TrainingFolder = Annotated[
    Path | None, Parameter("--out", help="Folder of the run (default: runs/<name>-<time>).")
]
Resume = Annotated[bool, Parameter(help="Continue the run in --out, or the last run.")]


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
        server: URL of the server whose nodes run the sessions, instead of the file's.
        engine: URL of the engine, instead of the file's; repeat for replicas.
        dry_run: Check everything and print the plan of the run.
    """
    console = Console(stderr=True, highlight=False)
    with _name_missing_extra("train"):
        from tugline.trainers import batches, loop, models, sinks  # noqa: PLC0415 - needs the extra
        from tugline.trainers.config import CONFIG, read_config  # noqa: PLC0415 - the same

        settings = read_config(config, DEMO_MODEL, server=server, engines=engine or ())
        if _is_follower():
            if not dry_run:
                with models.open_models(settings) as opened:
                    opened.trainer.follow()
            return
        tasks = batches.TaskBatches(settings, config.absolute().parent)
        tasks.check()
        figures = sinks.make_sinks(settings.metrics, console, settings.server)
        folder = _choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        if dry_run:
            print(batches.describe(settings, tasks, folder))
            return
        report = sinks.make_report(console)
        with _keep_resumable(folder, f"train {shlex.quote(str(config))}", console):
            summary = uvloop.run(loop.train(settings, tasks, folder, figures, report))
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
    with _name_missing_extra("train"):
        from tugline.trainers import sinks  # noqa: PLC0415 - needs the extra
        from tugline.trainers.config import CONFIG, MODEL  # noqa: PLC0415 - the same
        from tugline.trainers.sft import read_config, train  # noqa: PLC0415 - the same

        settings = read_config(config)
        if _is_follower():
            train(settings, None, sinks.Sinks(()), lambda _: None)
            return
        figures = sinks.make_sinks(settings.metrics, console)
        folder = _choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        with _keep_resumable(folder, f"sft {shlex.quote(str(config))}", console):
            end = train(settings, folder, figures, console.print)
    save_report(folder / SUMMARY, end, as_json=as_json)
    where = folder / MODEL
    console.print(f"done after {end.step} updates, {end.elapsed_s:.0f} s: {where}")


def demo(
    *,
    harness: str | None = None,
    command: str | None = None,
    builder: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    heldout: int | None = None,
    minutes: float | None = None,
    slots: int | None = None,
    window: int | None = None,
    port: int | None = None,
    config: Path | None = None,
    out: TrainingFolder = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train a tiny model on a real, unmodified agent in minutes.

    Args:
        harness: Agent to train: pi, shell or module:Class.
        command: Your agent's command, for --harness shell.
        builder: prefix_merging or per_request.
        seed: Seed of tasks, updates and sampling.
        steps: GRPO steps.
        heldout: Held-out tasks, evaluated before and after training.
        minutes: Maximum time of training.
        slots: Concurrent sessions.
        window: Context window in tokens.
        port: Port of the gateway; 0 for any.
        config: YAML or TOML file with any of the settings.
    """
    flags = locals()
    console = Console(stderr=True, highlight=False)
    with _name_missing_extra("demo"):
        from tugline.demo import run  # noqa: PLC0415 - needs the extra

        fields = run.DemoSettings.__struct_fields__
        given = {name: flags[name] for name in fields if flags.get(name) is not None}
        folder = _choose_folder(out, "demo", run.SETTINGS, resume=resume)
        settings = run.choose_settings(folder, given, config)
        training = run.make_config(settings)
        with _keep_resumable(folder, "demo", console):
            run.store_settings(folder, settings)
            summary = uvloop.run(run.run_demo(folder, settings, training, console))
    console.print(run.closing(summary, [folder / name for name in run.FILES]))
    if as_json:
        print_json({**msgspec.to_builtins(summary), "folder": str(folder)})


def _is_follower() -> bool:
    """Whether this is a rank of torchrun that only trains; rank 0 does everything else."""
    return int(os.environ.get("RANK", "0")) > 0


@contextlib.contextmanager
def _name_missing_extra(extra: str) -> Iterator[None]:
    """Raise `UsageError` with the extra to install if one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this command needs {error.name}: pip install 'tugline[{extra}]'"
        raise UsageError(msg) from error


def _choose_folder(out: Path | None, name: str, marker: str, *, resume: bool) -> Path:
    """Return the folder of the run. Raises `UsageError` for an existing run or a missing one."""
    if resume:
        runs = sorted(file.parent for file in RUNS.glob(f"{name}-*/{marker}"))
        folder = out or (runs[-1] if runs else None)
        if folder is None or not (folder / marker).exists():
            msg = f"{folder or RUNS} has no run of {name} to resume; leave out --resume"
            raise UsageError(msg)
        return folder
    if out is not None and (out / marker).exists():
        msg = f"{out} already contains a run; continue it with --resume, or choose another --out"
        raise UsageError(msg)
    return out or RUNS / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


@contextlib.contextmanager
def _keep_resumable(folder: Path, command: str, console: Console) -> Iterator[None]:
    """Create and log to the folder of a run; if the run is stopped, print the resume command."""
    folder.mkdir(parents=True, exist_ok=True)
    log.configure(level="info", path=folder / "log.jsonl")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        again = f"tugline {command} --resume --out {shlex.quote(str(folder))}"
        console.print(f"stopped; resume with: {again}", soft_wrap=True, markup=False)
        sys.exit(INTERRUPTED)
