"""The tutorial: its files are written and its commands run in order."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.fleet import until
from support.commands import run_program

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "tugline train train.yaml --out runs/first"
EVAL = "tugline eval bugs.yaml --k 4 --model runs/first/model --out scores"
PAGE = ROOT / "docs" / "start" / "train-your-agent.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path) -> str:
    """Run a command that must succeed; its output."""
    done = run_program("bash", "-c", command, cwd=folder, env=environment(), timeout=400)
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def environment() -> dict[str, str]:
    """That of a user in an activated virtual environment, without another server."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {key: value for key, value in os.environ.items() if "TUGLINE_" not in key} | {
        "PATH": path, "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def start_server(folder: Path) -> subprocess.Popen[bytes]:
    """Start `tugline up`, and wait until clients can discover it."""
    with (folder / "up.log").open("wb") as log:
        server = subprocess.Popen(
            ["tugline", "up", "--port", "0"], cwd=folder, env=environment(), stdout=log, stderr=log
        )
    address = folder / "tugline-data" / "server.json"
    until(lambda: address.exists() or server.poll() is not None, "the server", 90)
    assert server.poll() is None, (folder / "up.log").read_text()
    return server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_works(tmp_path: Path) -> None:
    """The user's own agent has valid tasks and usable sessions, and training helps."""
    outputs: dict[str, str] = {}
    server: subprocess.Popen[bytes] | None = None
    try:
        for kind, name, body in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if name:
                (tmp_path / name).write_text(body, encoding="utf-8")
            for command in (
                re.findall(r"^\$ (.*)$", body, re.MULTILINE) if kind == "console" else ()
            ):
                if command == "tugline up":
                    server = start_server(tmp_path)
                    continue
                if server and "train" in command:
                    server.send_signal(signal.SIGINT)  # Ctrl-C
                    assert server.wait(60) == 0
                    server = None
                outputs[command] = run(command, tmp_path)
    finally:
        if server:
            server.kill()
            server.wait()
    assert "fine: 8" in outputs["tugline task validate bugs.yaml"]
    assert "64 of 64 sessions are usable" in outputs["tugline submit bugs.yaml --wait"]
    assert len(list((tmp_path / "kept" / "trajectories").iterdir())) >= 64
    rewards = re.findall(r"^step \d+  reward ([\d.]+)", outputs[TRAIN], re.MULTILINE)
    assert len(rewards) == 6
    assert float(rewards[-1]) > float(rewards[0]) + 0.3
    assert "reward" in outputs["tugline view g0000035-report-7"]
    after = re.findall(r"mean reward +([\d.]+)", outputs[EVAL])
    assert float(after[0]) > 0.5
