"""``tugline sft``: supervised fine-tuning on a set; the command with ``--resume`` continues a run.

Progress goes to stderr, so that stdout has only the output of ``--json``.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tugline import log
from tugline.cli.options import INTERRUPTED, Json, name_missing_extra
from tugline.cli.train import SUMMARY, choose_folder


def sft(
    config: Annotated[Path, typer.Argument(help="YAML or TOML file of the run.")],
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run (default: runs/<name>-<time>).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or the last one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on accepted conversations or traces; resumable at any point."""
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("train"):
        from tugline.trainers.sft import MODEL, read_config, train  # noqa: PLC0415 - the extra
        from tugline.trainers.sinks import make_sinks  # noqa: PLC0415 - the same
        from tugline.trainers.state import CONFIG  # noqa: PLC0415 - the same

        settings = read_config(config)
        sinks = make_sinks(settings.metrics, console)
        folder = choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        folder.mkdir(parents=True, exist_ok=True)
        log.configure(level="info", path=folder / "log.jsonl")
        try:
            state = train(settings, folder, sinks, console.print)
        except KeyboardInterrupt:
            console.print(f"stopped; resume with: tugline sft {config} --resume --out {folder}")
            raise typer.Exit(INTERRUPTED) from None
    result = msgspec.json.encode(state)
    (folder / SUMMARY).write_bytes(msgspec.json.format(result) + b"\n")
    console.print(f"done after {state.step} updates, {state.elapsed_s:.0f} s: {folder / MODEL}")
    if as_json:
        typer.echo(result)
