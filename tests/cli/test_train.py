"""``tugline train`` as a process: killed at several points, it resumes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cli.conftest import Done
from training_run import write_config
from tugline.trainers.config import CHECKPOINTS
from tugline.trainers.sinks import METRICS, read_lines

TUGLINE = Path(sys.executable).with_name("tugline")
TESTS = Path(__file__).parents[1]


TORCHRUN = [str(TUGLINE.with_name("torchrun")), "--standalone", "--nproc-per-node=2", "--no-python"]


async def start(
    folder: Path, *arguments: str, before: Sequence[str] = ()
) -> asyncio.subprocess.Process:
    """The command, with the evaluator of the tests on its path."""
    return await asyncio.create_subprocess_exec(
        *before, str(TUGLINE), "train", "config.json", *arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


async def end(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit code and output, when it has ended."""
    out, err = await asyncio.wait_for(process.communicate(), 100)
    return process.returncode or 0, out.decode(), err.decode()


async def kill_when(process: asyncio.subprocess.Process, reached: Callable[[], bool]) -> None:
    """Kill it, and nothing that it started, at the first moment at which `reached` holds."""
    while not reached():
        if process.returncode is not None:
            _, _, err = await end(process)
            pytest.fail(f"ended before it was killed: {err}")
        await asyncio.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    await end(process)


def logged(run: Path, key: str) -> Callable[[], bool]:
    """Whether the metrics have a figure of step 1."""
    return lambda: (
        f'"{key}"'
        in "".join(json.dumps(row) for row in read_lines(run / METRICS) if row["step"] == 1)
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Killed while sampling, before, in and after a checkpoint: each prompt is trained once.

    The last two batches are drawn by pass rate, since the first two have all four tasks.
    """
    schedule: dict[str, Any] = {"steps": 4, "tasks_per_step": 2, "samples": 2, "staleness": 1}
    schedule["choose"] = "pass_rate"
    write_config(tmp_path, schedule=schedule, heldout={"every": 4})
    tasks = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(tasks[:4]))
    run = tmp_path / "run"
    points: dict[str, Callable[[], bool]] = {
        "while loading": (run / "config.json").exists,
        "while sampling": lambda: any((run / "recordings").glob("*")),
        "before a checkpoint": logged(run, "rollout/reward"),
        "in a checkpoint": lambda: any((run / CHECKPOINTS).glob("*step-000001*")),
        "while publishing": logged(run, "publish/version"),
        "with a drawn batch on its way": lambda: any((run / "recordings").rglob("g0000006-*")),
    }
    for number, reached in enumerate(points.values()):
        process = await start(tmp_path, "--out", "run", *(["--resume"] if number else []))
        await kill_when(process, reached)
    code, out, err = await end(await start(tmp_path, "--out", "run", "--resume", "--json"))
    assert code == 0, err
    state = msgspec.json.decode(out, type=dict[str, Any])["state"]
    assert (state["step"], state["sessions"], state["failed"]) == (4, 16, 0)
    ledger = state["ledger"]
    lost = [*ledger["masked"].values(), *ledger["dropped"].values()]
    assert ledger["sampled"] == ledger["trained"] + sum(lost)
    rows = [row for row in read_lines(run / METRICS) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["rollout/sessions"] for row in rows] == [4, 4, 4, 4]
    assert sum(row["rollout/sampled"] for row in rows) == ledger["sampled"]
    assert [score["step"] for score in state["scores"]] == [0, 4]
    started = {path.name.rpartition("-")[0] for path in (run / "recordings").rglob("g*.rec")}
    assert len(started) == 8, f"a batch was chosen twice: {sorted(started)}"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_on_two_devices_survives_the_death_of_one(tmp_path: Path) -> None:
    """All ranks end with it; the checkpoint of a sharded adapter goes on in one process."""
    write_config(
        tmp_path,
        schedule={"steps": 3, "tasks_per_step": 2, "samples": 2, "staleness": 1},
        fsdp=True,
        lora={"rank": 4},
        heldout=None,
    )
    run = tmp_path / "run"
    process = await start(tmp_path, "--out", "run", before=TORCHRUN)
    while not logged(run, "publish/version")():
        assert process.returncode is None, (await end(process))[2]
        await asyncio.sleep(0.05)
    ranks = psutil.Process(process.pid).children()
    (follower,) = [one for one in ranks if one.environ()["RANK"] == "1"]
    follower.kill()
    code, _, err = await end(process)
    assert code != 0
    assert "exitcode: -9" in err
    process = await start(tmp_path, "--out", "run", "--resume", "--json")
    code, out, err = await end(process)
    assert code == 0, err
    state = msgspec.json.decode(out, type=dict[str, Any])["state"]
    assert (state["step"], state["sessions"], state["failed"]) == (3, 12, 0)
    rows = [row for row in read_lines(run / METRICS) if "publish/version" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["publish/max_abs_dlogprob"] < 1e-4 for row in rows)


def test_a_dry_run_says_what_would_happen(tmp_path: Path, run_here: Callable[..., Done]) -> None:
    """Nothing is written, and a folder with a run asks for --resume."""
    write_config(tmp_path, schedule={"staleness": 1})
    code, out, err = run_here("train", "config.json", "--dry-run", "--out", "run")
    assert code == 0, err
    assert "3 of 2 groups, asynchronous, staleness <= 1; stale tokens are clipped: set" in out
    assert "sessions    12" in out
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    code, _, err = run_here("train", "config.json", "--out", "run")
    assert (code, "add --resume" in err) == (2, True)
