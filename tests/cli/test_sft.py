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
import torch

from commands import run_command
from trainers.test_sft import write_run
from tugline.inference.load import load
from tugline.trainers.config import CHECKPOINTS, MODEL
from tugline.trainers.sinks import METRICS, read_lines

TUGLINE = Path(sys.executable).with_name("tugline")
TORCHRUN = [TUGLINE.with_name("torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"]


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
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_two_processes_train_what_one_does(tmp_path: Path, lora: dict[str, int] | None) -> None:
    """Under torchrun with shards: losses and the model that is left, within 1e-5."""
    # a higher rate lets Adam turn the rounding of gradients near zero into steps of its own size
    run = write_run(tmp_path, lr=1e-3)
    config = msgspec.to_builtins(run, enc_hook=str) | {"lora": lora}
    (tmp_path / "sft.json").write_text(json.dumps(config))
    assert run_command("sft", "sft.json", "--out", "one", cwd=tmp_path).returncode == 0
    (tmp_path / "sft.json").write_text(json.dumps(config | {"fsdp": True}))
    done = subprocess.run(
        [*TORCHRUN, TUGLINE, "sft", "sft.json", "--out", "two"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = (read_lines(tmp_path / name / METRICS) for name in ("one", "two"))
    for name in ("sft/loss", "sft/heldout_loss", "sft/grad_norm", "sft/tokens"):
        expected = [row[name] for row in one if name in row]
        assert [row[name] for row in two if name in row] == pytest.approx(expected, abs=1e-5)
    left, right = (load(tmp_path / name / MODEL)[0].state_dict() for name in ("one", "two"))
    assert all(torch.allclose(left[name], right[name], atol=1e-5) for name in left)


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
