"""``tugline sft`` as a process: killed twice, it goes on and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from commands import run_command
from trainers.test_sft import write_run
from tugline.trainers.sft import MODEL
from tugline.trainers.state import CHECKPOINTS

TUGLINE = Path(sys.executable).with_name("tugline")


def kill_when(folder: Path, words: list[str], reached: Callable[[], bool]) -> None:
    """Start the command and kill it at the first moment at which `reached` holds."""
    with (folder / "out.txt").open("ab") as out:
        process = subprocess.Popen(
            [TUGLINE, "sft", "sft.json", "--out", "run", *words], cwd=folder, stdout=out, stderr=out
        )
    deadline = time.monotonic() + 200
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"not killed in time: {(folder / 'out.txt').read_text()}")
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Killed with kill -9 in the middle, it makes every update once and leaves a whole model."""
    config = write_run(tmp_path, epochs=20)
    (tmp_path / "sft.json").write_bytes(msgspec.json.encode(config, enc_hook=str))
    checkpoints = tmp_path / "run" / CHECKPOINTS
    for step in (4, 10):
        words = ["--resume"] if step > 4 else []
        kill_when(tmp_path, words, (checkpoints / f"step-{step:06d}").exists)
    done = run_command(
        "sft", "sft.json", "--out", "run", "--resume", "--json", cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    assert state["step"] == max(map(int, state["heldout"]))
    assert state["heldout"][str(state["step"])] < state["heldout"]["0"]
    again = run_command("sft", "sft.json", "--out", "run", cwd=tmp_path, timeout=100)
    assert "holds a run already; add --resume" in again.stderr
    assert (tmp_path / "run" / MODEL / "tokenizer.json").exists()
