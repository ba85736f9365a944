"""``tugline sft``: supervised fine-tuning on a set; the command with ``--resume`` continues a run.

Progress goes to stderr, so that stdout has only the output of ``--json``.
"""

import os
from pathlib import Path

from rich.console import Console

from tugline.cli.options import Json, Resume, TrainingFolder, name_missing_extra, save_report
from tugline.cli.train import SUMMARY, choose_folder, keep_resumable


def sft(
    config: Path, /, *, out: TrainingFolder = None, resume: Resume = False, as_json: Json = False
) -> None:
    """Fine-tune a model on accepted conversations or traces; resumable at any point.

    Args:
        config: YAML or TOML file of the run.
    """
    console = Console(stderr=True, highlight=False)
    with name_missing_extra("train"):
        from tugline.trainers.sft import MODEL, read_config, train  # noqa: PLC0415 - the extra
        from tugline.trainers.sinks import Sinks, make_sinks  # noqa: PLC0415 - the same
        from tugline.trainers.state import CONFIG  # noqa: PLC0415 - the same

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
