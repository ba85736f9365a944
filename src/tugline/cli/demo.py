"""``tugline demo``: train a tiny model to fix small repositories through a real agent harness.

Options are the most used fields of `DemoSettings`; they override the configuration file, and a
resumed run keeps its settings.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tugline.cli.options import Json, Resume, TrainingFolder, name_missing_extra
from tugline.cli.train import choose_folder, keep_resumable
from tugline.web import serve

_SETTINGS = (
    "harness", "command", "builder", "seed", "steps", "heldout", "minutes", "slots", "window",
    "port",
)  # fmt: skip
"""The flags that are settings of the run."""


def demo(  # noqa: PLR0913 - each is a flag
    *,
    harness: Annotated[
        str | None, typer.Option(help="Agent to train: pi, shell or module:Class.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(help="Your agent's command, for --harness shell.")
    ] = None,
    builder: Annotated[
        str | None, typer.Option(help="prefix_merging, per_request or tree.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of tasks, updates and sampling.")] = None,
    steps: Annotated[int | None, typer.Option(help="GRPO steps.")] = None,
    heldout: Annotated[int | None, typer.Option(help="Held-out tasks, before and after.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Longest time for training.")] = None,
    slots: Annotated[int | None, typer.Option(help="Concurrent sessions.")] = None,
    window: Annotated[int | None, typer.Option(help="Context window in tokens.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 for any.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML or TOML file with any of the settings.")
    ] = None,
    out: TrainingFolder = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train a tiny model on a real, unmodified agent in minutes."""
    flags = locals()
    given = {name: flags[name] for name in _SETTINGS if flags[name] is not None}
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("demo"):
        from tugline.demo import run  # noqa: PLC0415 - needs the extra
        from tugline.demo.report import closing  # noqa: PLC0415 - the same

        folder = choose_folder(out, "demo", run.SETTINGS, resume=resume)
        settings = run.choose_settings(folder, given, config)
        training = run.make_config(settings)
        with keep_resumable(folder, "demo", console):
            run.store_settings(folder, settings)
            summary = serve.run(run.run_demo(folder, settings, training, console))
    console.print(closing(summary, [folder / name for name in run.FILES]))
    if as_json:
        typer.echo(msgspec.json.encode({**msgspec.to_builtins(summary), "folder": str(folder)}))
