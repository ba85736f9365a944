"""Start or resume a run: its folder, its settings, and stopping it."""

import asyncio
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console

from tugline import log
from tugline.config import from_mapping, load
from tugline.demo.report import closing
from tugline.demo.run import PICTURE, SUMMARY, make_config, run_demo
from tugline.demo.settings import DemoSettings
from tugline.demo.summary import DemoSummary
from tugline.errors import UsageError
from tugline.trainers.sinks import METRICS
from tugline.web import serve

RUNS = Path("runs")
SETTINGS = "settings.yaml"


def choose_run(
    given: Mapping[str, Any], *, config: Path | None, out: Path | None, resume: bool
) -> tuple[Path, DemoSettings]:
    """Return the run's folder and settings; `given` overrides the file at `config`.

    A resumed run keeps its settings; a new run starts if there is none to resume. Raises
    `UsageError` if given settings differ from those of the resumed run.
    """
    base = load(config, DemoSettings) if config is not None else DemoSettings()
    settings = from_mapping({**msgspec.to_builtins(base), **given}, DemoSettings, source="options")
    if not resume and out is not None and (out / SETTINGS).exists():
        msg = f"{out} holds a run already; add --resume to continue it, or choose another --out"
        raise UsageError(msg)
    folder = out or (_find_unfinished() if resume else None)
    if folder is None or not (folder / SETTINGS).exists():
        return folder or RUNS / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}", settings
    stored = load(folder / SETTINGS, DemoSettings)
    changed = [key for key, value in given.items() if getattr(stored, key) != value]
    if changed or (config is not None and stored != settings):
        what = ", ".join(changed) or config
        msg = f"{folder} was started with other settings ({what}); leave them out to resume it"
        raise UsageError(msg)
    return folder, stored


def _find_unfinished() -> Path | None:
    """Return the latest run without a summary."""
    runs = [file.parent for file in sorted(RUNS.glob(f"demo-*/{SETTINGS}"), reverse=True)]
    return next((run for run in runs if not (run / SUMMARY).exists()), None)


def start(folder: Path, settings: DemoSettings) -> DemoSummary | None:
    """Run to the end with progress on stderr; None if stopped by Ctrl-C or SIGTERM."""
    config = make_config(settings)
    folder.mkdir(parents=True, exist_ok=True)
    _store(folder / SETTINGS, settings)
    log.configure(level="info", path=folder / "log.jsonl")
    console = Console(stderr=True, highlight=False)

    async def run() -> DemoSummary:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run_demo(folder, settings, config, console)

    try:
        summary = serve.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"stopped; resume with: tugline demo --resume --out {folder}")
        return None
    names = (PICTURE, SUMMARY, METRICS, "checkpoints", "recordings", "log.jsonl")
    console.print(closing(summary, [folder / name for name in names]))
    return summary


def _store(path: Path, settings: DemoSettings) -> None:
    if not path.exists():
        draft = path.with_suffix(".part")
        draft.write_text(yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False))
        draft.replace(path)
