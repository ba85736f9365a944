"""The demo as people start it, small: the real pi, the embedded engine, GRPO, files, kill -9."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from commands import TUGLINE
from tugline.launch.server import STORE
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.trainers.sinks import METRICS, read_lines
from tugline.types import Ledger

ROOT = Path(__file__).parents[2]
OWN = f"{sys.executable} examples/agents/openai_loop.py"


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """``tugline demo`` in a process group of its own."""
    return subprocess.Popen(
        [TUGLINE, "demo", "--json", "--out", folder, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> Any:
    """The JSON object that a run ends with."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    return json.loads(out)


def steps(folder: Path) -> list[dict[str, Any]]:
    """The figures of each step's sessions and update."""
    return [row for row in read_lines(folder / METRICS) if "rollout/reward" in row]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("options", "harness", "version"),
    [
        pytest.param((), "pi", "0.87.1", marks=pytest.mark.pi),
        pytest.param(("--harness", "shell", "--command", OWN), "shell", "", marks=pytest.mark.slow),
    ],
    ids=["pi", "script"],
)
def test_an_agent_is_trained_and_every_number_is_reported(
    options: tuple[str, ...], harness: str, version: str, tmp_path: Path
) -> None:
    """Two steps with pi, or a script of one's own: exact continuations, ledger, logprobs, files.

    Killed with kill -9 after the first step, it ends with each session counted exactly once.
    """
    folder, config = tmp_path / "run", tmp_path / "small.yaml"
    config.write_text("steps: 2\ntasks_per_step: 2\nsamples: 3\nheldout: 2\nslots: 2\n")
    process = start(folder, "--config", str(config), *options)
    while not steps(folder):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=30)
    acknowledged = results(folder)
    assert acknowledged
    summary = finish(start(folder, "--resume"))
    found = results(folder)
    assert found.items() >= acknowledged.items()
    assert len(found) == 2 * 2 * 3 + 2 * 2, "those of two steps and of two evaluations"
    left = (Path(one.info["cwd"] or "/") for one in psutil.process_iter(["cwd"]))
    assert not [cwd for cwd in left if cwd.is_relative_to(folder)], "programs that run there"
    assert (summary["harness"], summary["harness_version"]) == (harness, version)
    state = summary["state"]
    assert (state["step"], state["sessions"], state["updates"] > 0) == (2, 2 * 2 * 3, True)
    assert [score["evaluation"]["attempts"] for score in state["scores"]] == [2, 2]
    assert state["failed"] == 0
    assert msgspec.convert(state["ledger"], Ledger).balanced
    trained = state["ledger"]["trained"]
    assert trained > 0
    rows = steps(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["update/ledger/sampled"] == row["rollout/sampled"] for row in rows)
    assert sum(row["update/ledger/trained"] for row in rows) == trained
    assert sum(row["rollout/sampled"] for row in rows) == state["ledger"]["sampled"]
    assert summary["replay_max_abs_dlogprob"] <= 1e-4
    assert set(summary) >= {"before", "after", "cpu_seconds", "seed"}
    for name in ("training.png", "summary.json", "metrics.jsonl", "settings.yaml", "log.jsonl"):
        assert (folder / name).stat().st_size > 0
    files = list_recordings(folder / "recordings")
    calls = [call for file in files for call in recordings.read(file).calls]
    turns = [call for call in calls if call.number > 0]
    assert turns
    assert [call.branch for call in turns if call.branch is not None] == []


def results(folder: Path) -> dict[str, str]:
    """Every committed session and the digest of its result."""
    with contextlib.closing(sqlite3.connect(folder / STORE)) as db:
        return dict(db.execute("SELECT session, digest FROM results").fetchall())
