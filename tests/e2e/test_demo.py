"""The demo as people start it, small: the real pi, the embedded engine, GRPO, files, kill -9."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import TUGLINE
from tugline.launch.server import STORE
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.trainers.grpo import checkpoint
from tugline.trainers.sinks import METRICS, read_lines
from tugline.types import Ledger

SMALL = "steps: {steps}\ntasks_per_step: 2\nsamples: 3\nheldout: {heldout}\nslots: 2\n"
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


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> dict[str, Any]:
    """The JSON object that a run ends with."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def small(tmp_path: Path, steps: int, heldout: int = 2) -> Path:
    """A configuration that takes seconds."""
    config = tmp_path / "small.yaml"
    config.write_text(SMALL.format(steps=steps, heldout=heldout))
    return config


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
    """Two steps with pi, or a script of one's own: exact continuations, ledger, logprobs, files."""
    folder = tmp_path / "run"
    summary = finish(start(folder, "--config", str(small(tmp_path, 2)), *options))
    assert (summary["harness"], summary["harness_version"]) == (harness, version)
    state = summary["state"]
    assert (state["step"], state["sessions"], state["updates"] > 0) == (2, 2 * 2 * 3, True)
    assert [score["evaluation"]["attempts"] for score in state["scores"]] == [2, 2]
    assert state["failed"] == 0
    assert msgspec.convert(state["ledger"], Ledger).balanced
    trained = state["ledger"]["trained"]
    assert trained > 0
    rows = steps(folder)
    assert all(row["update/ledger/sampled"] == row["rollout/sampled"] for row in rows)
    assert sum(row["update/ledger/trained"] for row in rows) == trained
    assert summary["replay_max_abs_dlogprob"] <= 1e-4
    assert set(summary) >= {"before", "after", "cpu_seconds", "seed"}
    for name in ("training.png", "summary.json", "metrics.jsonl", "settings.yaml", "log.jsonl"):
        assert (folder / name).stat().st_size > 0
    files = list_recordings(folder / "recordings")
    calls = [call for file in files for call in recordings.read(file).calls]
    turns = [call for call in calls if call.number > 0]
    assert turns
    assert [call.branch for call in turns if call.branch is not None] == []


@pytest.mark.pi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_at_any_moment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """A run that is killed again and again ends with each session counted exactly once."""
    folder, config = tmp_path / "run", small(tmp_path, 4, heldout=4)
    rng = random.Random(5)
    acknowledged: dict[str, str] = {}
    for _ in range(6):
        resumes = ["--resume"] if (folder / "settings.yaml").exists() else []
        process = start(folder, "--config", str(config), *resumes)
        while not (folder / "settings.yaml").exists():
            time.sleep(0.05)
        time.sleep(rng.uniform(4, 16))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        found = results(folder)
        assert found.items() >= acknowledged.items()
        acknowledged = found
    summary = finish(start(folder, "--resume"), 600)
    assert (summary["state"]["sessions"], summary["state"]["failed"]) == (4 * 2 * 3, 0)
    found = results(folder)
    assert found.items() >= acknowledged.items()
    assert len(found) == 4 * 2 * 3 + 2 * 4, "those of four steps and of two evaluations"
    rows = steps(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    sampled = summary["state"]["ledger"]["sampled"]
    assert sum(row["rollout/sampled"] for row in rows) == sampled
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    assert checkpoint.read(newest).step == 4
    assert not [one for one in Path("/proc").glob("[0-9]*") if runs_in(one, folder)]


def results(folder: Path) -> dict[str, str]:
    """Every committed session and the digest of its result."""
    if not (folder / STORE).exists():
        return {}
    with sqlite3.connect(folder / STORE) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE name = 'results'").fetchall()
        rows = db.execute("SELECT session, digest FROM results").fetchall() if tables else []
    db.close()
    return dict(rows)


def runs_in(process: Path, folder: Path) -> bool:
    """Whether a process works inside `folder`."""
    try:
        return (process / "cwd").resolve().is_relative_to(folder)
    except OSError:
        return False
