"""``tugline eval`` with a real engine: rates, a comparison with an earlier run, and resuming."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from training_run import write_config
from tugline.recording.trajectories import RESULTS

TUGLINE = Path(sys.executable).with_name("tugline")
TESTS = Path(__file__).parents[1]


def measure(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Run the command; its JSON, and what it said on the way."""
    done = subprocess.run(
        [TUGLINE, "eval", "set.json", "--model", "model", "--renderer", "qwen3", "--json", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=dict[str, Any]), done.stderr


@pytest.mark.engine
def test_two_runs_are_compared_task_by_task(tmp_path: Path) -> None:
    """Three sessions of each of five tasks; a finished run is only read again."""
    config = msgspec.json.decode(write_config(tmp_path).read_bytes())
    taskset = config["tasks"]["taskset"]
    tasks = {"taskset": taskset, "template": config["template"]}
    (tmp_path / "set.json").write_bytes(msgspec.json.encode(tasks))
    first, _ = measure(tmp_path, "--out", "first", "--k", "3")
    found = first["evaluation"]
    assert (found["attempts"], found["unrewarded"], first["change"]) == (15, 0, None)
    assert sorted(found["pass_at"]) == ["1", "2", "3"]
    rates = [found["pass_at"][k]["value"] for k in "123"]
    assert rates == sorted(rates)
    assert found["pass_at"]["1"]["value"] == pytest.approx(found["reward"])
    before = (tmp_path / "first" / RESULTS).read_bytes()
    again, _ = measure(tmp_path, "--out", "first", "--k", "3", "--compare", "first")
    assert (tmp_path / "first" / RESULTS).read_bytes() == before
    assert again["evaluation"] == found
    change = again["change"]
    assert (change["better"], change["worse"], change["difference"]["tasks"]) == (0, 0, 5)
    assert change["difference"]["low"] < 0 < change["difference"]["high"]
