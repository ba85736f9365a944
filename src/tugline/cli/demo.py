"""``tugline demo``: a tiny model learns to mend small repositories through a real agent harness.

Options are the fields of `DemoSettings`; a configuration file gives them all, the command line
overrides it, and a resumed run keeps what it was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tugline import log
from tugline.errors import UsageError

if TYPE_CHECKING:
    from tugline.demo.metrics import Summary
    from tugline.demo.settings import DemoSettings

RUNS = Path("runs")


def demo(  # noqa: PLR0913 - each is a flag
    *,
    harness: Annotated[
        str | None, typer.Option(help="Agent to train: pi, shell or module:Class.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(help="Your agent's command, for --harness shell.")
    ] = None,
    builder: Annotated[str | None, typer.Option(help="prefix_merging or per_request.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of tasks, updates and sampling.")] = None,
    steps: Annotated[int | None, typer.Option(help="GRPO steps.")] = None,
    heldout: Annotated[int | None, typer.Option(help="Held-out tasks, before and after.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop training when it would take longer.")
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Sessions at the same time.")] = None,
    window: Annotated[int | None, typer.Option(help="Context window in tokens.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 for any.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML or TOML file with any of the settings.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/demo-<time>).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last unfinished run, or with --out.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")
    ] = False,
    rebuild_warm_start: Annotated[
        bool, typer.Option("--rebuild-warm-start", help="Make the shipped start policy anew.")
    ] = False,
) -> None:
    """Train a tiny model on a real, unmodified agent, on this machine, in about ten minutes."""
    given = {
        "harness": harness,
        "command": command,
        "builder": builder,
        "seed": seed,
        "steps": steps,
        "heldout": heldout,
        "minutes": minutes,
        "slots": slots,
        "window": window,
        "port": port,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    with _extra_needed():
        if rebuild_warm_start:
            from tugline.demo.record import rebuild  # noqa: PLC0415 - needs the extra

            asyncio.run(rebuild(out))
            return
        folder, settings = _chosen(config, overrides, out, resume=resume)
        summary = _run(folder, settings)
    if as_json:
        typer.echo(msgspec.json.encode({**summary.told(), "folder": str(folder)}).decode())


def _run(folder: Path, settings: DemoSettings) -> Summary:
    """Run to the end, shown on stderr; Ctrl-C and SIGTERM stop it cleanly."""
    from rich.console import Console  # noqa: PLC0415 - beside the demo's own imports

    from tugline.demo.live import Live  # noqa: PLC0415 - needs the extra
    from tugline.demo.report import closing  # noqa: PLC0415
    from tugline.demo.run import PICTURE, SUMMARY, Demo  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    log.configure(level="info", path=folder / "log.jsonl")
    console = Console(stderr=True, highlight=False)

    async def run() -> Summary:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with Live(settings.steps, console) as live:
            return await Demo(settings, folder, live).run()

    try:
        summary = asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"stopped; go on with: tugline demo --resume --out {folder}")
        raise typer.Exit(130) from None
    files = [
        folder / name for name in (PICTURE, SUMMARY, "metrics.jsonl", "checkpoints", "segments")
    ]
    console.print(closing(summary, files))
    return summary


def _chosen(
    config: Path | None, overrides: dict[str, Any], out: Path | None, *, resume: bool
) -> tuple[Path, DemoSettings]:
    """The run's folder and settings."""
    from tugline.config import from_mapping, load  # noqa: PLC0415
    from tugline.demo.run import SETTINGS, SUMMARY  # noqa: PLC0415
    from tugline.demo.settings import DemoSettings  # noqa: PLC0415

    base = load(config, DemoSettings) if config is not None else DemoSettings()
    settings = from_mapping({**base.model_dump(), **overrides}, DemoSettings, source="options")
    if not resume:
        if out is not None and (out / SETTINGS).exists():
            msg = f"{out} holds a run already; add --resume to go on with it, or choose another"
            raise UsageError(msg)
        return out or RUNS / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}", settings
    folder = out or _unfinished(SETTINGS, SUMMARY)
    if folder is None or not (folder / SETTINGS).exists():
        return folder or RUNS / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}", settings
    kept = DemoSettings.model_validate_json((folder / SETTINGS).read_text())
    changed = [key for key, value in overrides.items() if getattr(kept, key) != value]
    if changed or (config is not None and kept != settings):
        what = ", ".join(changed) or str(config)
        msg = f"{folder} was started with other settings ({what}); leave them out to resume it"
        raise UsageError(msg)
    return folder, kept


def _unfinished(settings: str, summary: str) -> Path | None:
    runs = sorted(RUNS.glob(f"demo-*/{settings}"))
    return next((one.parent for one in reversed(runs) if not (one.parent / summary).exists()), None)


class _extra_needed(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a verb
    """Say which extra to install when one of its packages is missing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ModuleNotFoundError):
            msg = f"the demo needs {error.name}: pip install 'tugline[demo]'"
            raise UsageError(msg) from error
