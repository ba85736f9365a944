"""``tugline demo``: train a tiny model; ``--resume`` continues a run.

Progress goes to stderr, so stdout has only the output of ``--json``.
"""

from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from tugline.cli.options import Json
from tugline.cli.output import print_json
from tugline.cli.training_run import (
    Resume,
    TrainingFolder,
    choose_folder,
    keep_resumable,
    name_missing_extra,
)


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
    with name_missing_extra("demo"):
        from tugline.demo import run  # noqa: PLC0415 - needs the extra

        fields = run.DemoSettings.__struct_fields__
        given = {name: flags[name] for name in fields if flags.get(name) is not None}
        folder = choose_folder(out, "demo", run.SETTINGS, resume=resume)
        settings = run.choose_settings(folder, given, config)
        training = run.make_config(settings)
        with keep_resumable(folder, "demo", console):
            run.store_settings(folder, settings)
            summary = uvloop.run(run.run_demo(folder, settings, training, console))
    console.print(run.closing(summary, [folder / name for name in run.FILES]))
    if as_json:
        print_json({**msgspec.to_builtins(summary), "folder": str(folder)})
