"""The toy of `examples/swe_gym`: a copy of the example, its commands, and the metrics of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.commands import TUGLINE
from support.swe_repository import EXAMPLE, make_repository
from tugline.trainers.sinks import METRICS, read_lines

ROOT = EXAMPLE.parents[1]
STEPS = (1, 2)


def make_start(folder: Path, *options: str) -> Path:
    """Copy the example into `folder`, make its rows and its trained start; returns the copy."""
    example = folder / "examples" / "swe_gym"
    made = shutil.ignore_patterns("start", "larder", "rows.jsonl", "runs", "models")
    shutil.copytree(EXAMPLE, example, ignore=made)
    (folder / "tools").symlink_to(ROOT / "tools")
    make_repository(example / "toy")
    run(example, sys.executable, "toy/make_start.py", *options)
    run(example, TUGLINE, "sft", "toy/sft.yaml", "--out", "toy/start/sft")
    return example


def run(folder: Path, *line: object) -> str:
    """Run a command that must succeed; its output."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [str(part) for part in line],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def read_metrics(run_folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(run_folder / METRICS):
        steps.setdefault(line["step"], {}).update(line)
    return steps
