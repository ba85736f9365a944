"""A run of training: its folder, its log, and how it is resumed."""

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

from cyclopts import Parameter
from rich.console import Console

from tugline import log
from tugline.cli.process import INTERRUPTED
from tugline.errors import UsageError

RUNS = Path("runs")
SUMMARY = "summary.json"

TrainingFolder = Annotated[
    Path | None, Parameter("--out", help="Folder of the run (default: runs/<name>-<time>).")
]
Resume = Annotated[bool, Parameter(help="Continue the run in --out, or the last run.")]


def is_follower() -> bool:
    """Whether this is a rank of torchrun that only trains; rank 0 does everything else."""
    return int(os.environ.get("RANK", "0")) > 0


@contextlib.contextmanager
def name_missing_extra(extra: str) -> Iterator[None]:
    """Raise `UsageError` with the extra to install if one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"this command needs {error.name}: pip install 'tugline[{extra}]'"
        raise UsageError(msg) from error


def choose_folder(out: Path | None, name: str, marker: str, *, resume: bool) -> Path:
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
def keep_resumable(folder: Path, command: str, console: Console) -> Iterator[None]:
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
