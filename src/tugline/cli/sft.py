"""``tugline sft``: fine-tune a model; ``--resume`` continues a run.

Progress goes to stderr, so stdout has only the output of ``--json``.
"""

import shlex
from pathlib import Path

from rich.console import Console

from tugline.cli.key_values import parse_options
from tugline.cli.options import Changes, Json
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


def sft(
    config: Path,
    /,
    *,
    out: TrainingFolder = None,
    resume: Resume = False,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on accepted conversations or traces; resumable at any point.

    Args:
        config: YAML or TOML file of the run.
    """
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("train"):
        from tugline.trainers import sinks  # noqa: PLC0415 - needs the extra
        from tugline.trainers.config import CONFIG, MODEL  # noqa: PLC0415 - the same
        from tugline.trainers.progress import RunProgress, VisibleProgress  # noqa: PLC0415 - the same
        from tugline.trainers.sft import read_config, train  # noqa: PLC0415 - the same

        settings = read_config(config, parse_options(changes, "--set"))
        if is_follower():
            train(settings, None, sinks.Sinks(()), RunProgress())
            return
        figures = sinks.make_sinks(settings.metrics, console)
        folder = choose_folder(out or settings.out, config.stem, CONFIG, resume=resume)
        command = ["sft", str(config), *(f"--set={each}" for each in changes or ())]
        progress = VisibleProgress(console)
        with keep_resumable(folder, shlex.join(command), console), progress.line:
            end = train(settings, folder, figures, progress)
    save_report(folder / SUMMARY, end, as_json=as_json)
    where = folder / MODEL
    console.print(f"done after {end.step} updates, {end.elapsed_s:.0f} s: {where}")
