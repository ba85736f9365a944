"""``tugline eval`` with a real engine: rates, a comparison with an earlier run, and resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.conftest import Done
from training_run import write_config
from tugline.recording.trajectories import RESULTS


@pytest.mark.engine
def test_two_runs_are_compared_task_by_task(tmp_path: Path, run_here: Callable[..., Done]) -> None:
    """Three sessions of each of five tasks; a finished run is only read again."""
    config = msgspec.json.decode(write_config(tmp_path).read_bytes())
    taskset = config["tasks"]["taskset"]
    tasks = {"taskset": taskset, "template": config["template"]}
    (tmp_path / "set.json").write_bytes(msgspec.json.encode(tasks))

    def measure(*words: str) -> dict[str, Any]:
        set_and_model = ("set.json", "--model", "model", "--renderer", "qwen3")
        done = run_here("eval", *set_and_model, "--out", "first", "--k", "3", "--json", *words)
        assert done.code == 0, done.err
        return msgspec.json.decode(done.out, type=dict[str, Any])

    first = measure()
    found = first["evaluation"]
    assert (found["attempts"], found["unrewarded"], first["change"]) == (15, 0, None)
    assert sorted(found["pass_at"]) == ["1", "2", "3"]
    rates = [found["pass_at"][k]["value"] for k in "123"]
    assert rates == sorted(rates)
    assert found["pass_at"]["1"]["value"] == pytest.approx(found["reward"])
    before = (tmp_path / "first" / RESULTS).read_bytes()
    again = measure("--compare", "first")
    assert (tmp_path / "first" / RESULTS).read_bytes() == before
    assert again["evaluation"] == found
    change = again["change"]
    assert (change["better"], change["worse"], change["difference"]["tasks"]) == (0, 0, 5)
    assert change["difference"]["low"] < 0 < change["difference"]["high"]
