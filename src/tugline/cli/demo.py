"""``tugline demo``: train a tiny model to fix small repositories through a real agent harness.

Options are the most used fields of `DemoSettings`; they override the configuration file, and a
resumed run keeps its settings.
"""

from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from tugline.cli.options import Json, Resume, TrainingFolder, name_missing_extra
from tugline.cli.output import print_json
from tugline.cli.train import choose_folder, keep_resumable

_SETTINGS = (
    "harness", "command", "builder", "seed", "steps", "heldout", "minutes", "slots", "window",
    "port",
)  # fmt: skip
"""The flags that are settings of the run."""


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
        builder: prefix_merging, per_request or tree.
        seed: Seed of tasks, updates and sampling.
        steps: GRPO steps.
        heldout: Held-out tasks, before and after.
        minutes: Longest time for training.
        slots: Concurrent sessions.
        window: Context window in tokens.
        port: Port of the gateway; 0 for any.
        config: YAML or TOML file with any of the settings.
    """
    flags = locals()
    given = {name: flags[name] for name in _SETTINGS if flags[name] is not None}
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("demo"):
        from tugline.demo import run  # noqa: PLC0415 - needs the extra
        from tugline.demo.run import closing  # noqa: PLC0415 - the same

        folder = choose_folder(out, "demo", run.SETTINGS, resume=resume)
        settings = run.choose_settings(folder, given, config)
        training = run.make_config(settings)
        with keep_resumable(folder, "demo", console):
            run.store_settings(folder, settings)
            summary = uvloop.run(run.run_demo(folder, settings, training, console))
    console.print(closing(summary, [folder / name for name in run.FILES]))
    if as_json:
        print_json({**msgspec.to_builtins(summary), "folder": str(folder)})
