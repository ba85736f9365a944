"""A small demo from the command line: the real pi, the embedded engine, GRPO, files, kill -9."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from pathlib import Path

import psutil
import pytest

from cli.conftest import end, kill_when, start
from support.commands import TUGLINE
from support.training import check_totals
from tugline.launch.server import STORE
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.trainers.sinks import METRICS, read_lines

ROOT = Path(__file__).parents[2]
OWN = f"{sys.executable} examples/agents/openai_loop.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("options", "harness", "version"),
    [
        pytest.param((), "pi", "1.6.0", marks=pytest.mark.pi),
        pytest.param(
            ("--harness", "shell", "--command", OWN),
            "shell",
            "",
            marks=[pytest.mark.slow, pytest.mark.nightly],
        ),
    ],
    ids=["pi", "script"],
)
async def test_an_agent_is_trained_across_a_crash(
    options: tuple[str, ...], harness: str, version: str, tmp_path: Path
) -> None:
    """Two steps have exact continuations, ledger, logprobs and files, with pi or a script.

    Killed with kill -9 after the first step and resumed, it counts each session exactly once.

    A run is checked as a whole, since it takes minutes.
    """
    folder, config = tmp_path / "run", tmp_path / "small.yaml"
    config.write_text("steps: 2\ntasks_per_step: 2\nsamples: 3\nheldout: 2\nslots: 2\n")
    demo = (TUGLINE, "demo", "--json", "--out", folder)
    process = await start(ROOT, *demo, "--config", config, *options)
    await kill_when(
        process, lambda: any("rollout/reward" in row for row in read_lines(folder / METRICS))
    )
    acknowledged = read_results(folder)
    assert acknowledged
    out, _ = await end(await start(ROOT, *demo, "--resume"))
    summary = json.loads(out)
    results = read_results(folder)
    assert results.items() >= acknowledged.items()
    assert len(results) == 2 * 2 * 3 + 2 * 2, "those of two steps and of two evaluations"
    folders = (Path(process.info["cwd"] or "/") for process in psutil.process_iter(["cwd"]))
    assert not [cwd for cwd in folders if cwd.is_relative_to(folder)], "programs left running"
    assert (summary["harness"], summary["harness_version"]) == (harness, version)
    state = summary["state"]
    rows = check_totals(folder, state, steps=2, sessions=2 * 2 * 3)
    assert state["updates"] > 0
    assert [score["evaluation"]["attempts"] for score in state["scores"]] == [2, 2]
    trained = state["ledger"]["trained"]
    assert trained > 0
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


def read_results(folder: Path) -> dict[str, str]:
    """Committed sessions and the digests of their results."""
    with contextlib.closing(sqlite3.connect(folder / STORE)) as db:
        return dict(db.execute("SELECT session, digest FROM results").fetchall())
