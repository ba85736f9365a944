"""``tugline launch slurm`` with fake SLURM programs; tests/cluster has the real ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run, Shell
from support.training import write_config

PROGRAMS = Path(__file__).parent / "slurm"
TASK = (
    "{id: t, instruction: x, harness: {name: shell, options: {command: ['true']}},"
    " evaluator: session_completed}"
)
COMMAND = ("launch", "slurm", "--tasks", "t.yaml", "--run", "run")


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task; the fake SLURM reads its files `queue` and `accounting`."""
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    monkeypatch.setenv("SLOTS", "99")
    (tmp_path / "t.yaml").write_text(TASK)
    return tmp_path


def read_submission(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and options of the last `sbatch`."""
    lines = (folder / "submitted").read_text().splitlines()
    options = lines[lines.index("--parsable") :]
    return dict(line.partition("=")[::2] for line in lines[: -len(options)]), options


def test_a_dry_run_prints_what_would_be_submitted(run_here: Run, slurm: Path) -> None:
    """The printed lines, run in a shell, submit the same job as `--submit`."""
    more = ("--nodes=3", "--time=60", "--engines=1", "--engine-command=serve --port $PORT",
            "--sbatch", "--partition=main --qos=low", "--set", "STOP_S=5")  # fmt: skip
    dry = run_here(*COMMAND, *more, "--dry-run")
    assert not (slurm / "run").exists()
    env = {**os.environ, "SLOTS": ""}
    subprocess.run(["bash", "-c", dry.stdout], cwd=slurm, check=True, env=env)
    pasted, options = read_submission(slurm)
    assert run_here(*COMMAND, *more, "--submit").returncode == 0
    env, again = read_submission(slurm)
    assert again == options
    assert options[1:3] == ["--nodes=3", "--time=60"]
    assert options[4:6] == ["--partition=main", "--qos=low"]
    assert Path(options[-1]).read_text().startswith("#!/bin/bash")
    expected = {
        "CONFIG": "", "TASKS": "t.yaml", "RUN": str(slurm / "run"), "ENGINES": "1", "STOP_S": "5",
        "ENGINE": "serve --port $PORT", "SLOTS": "",
    }  # fmt: skip
    assert {name: env[name] for name in expected} == expected
    assert {name: pasted.get(name, "") for name in expected} == expected


def test_a_run_has_one_job_at_a_time(run_here: Run, slurm: Path) -> None:
    """A second job is refused until SLURM reports the end of the first."""
    first = run_here(*COMMAND, "--submit", "--json")
    assert json.loads(first.stdout)["job"] == "17"
    assert (slurm / "run" / "slurm-job").read_text() == "17\n"
    (slurm / "submitted").unlink()
    (slurm / "queue").write_text("PENDING|Resources||1:00:00\n")
    refused = run_here(*COMMAND, "--submit")
    assert (refused.returncode, refused.stderr) == (
        2, f"tugline: job 17 of {slurm}/run is PENDING; end it with scancel\n"
    )  # fmt: skip
    assert not (slurm / "submitted").exists()
    (slurm / "queue").unlink()
    output = run_here(*COMMAND, "--submit").stdout
    assert f"job 17\ntugline launch slurm --run {slurm}/run --status\n" in output


@pytest.mark.parametrize(
    ("queue", "accounting", "line"),
    [
        ("PENDING|Priority||1:00:00", "", "job 17, state PENDING, reason Priority, left 1:00:00"),
        ("", "TIMEOUT|TimeLimit|n1", "job 17, state TIMEOUT, reason TimeLimit, machines n1"),
        ("", "", "job 17, state ENDED"),
    ],
)  # fmt: skip
def test_the_state_of_a_job(
    run_here: Run, slurm: Path, queue: str, accounting: str, line: str
) -> None:
    """The state comes from the queue, or else from the accounting if the cluster has one."""
    assert run_here(*COMMAND, "--submit").returncode == 0
    for name, text in (("queue", queue), ("accounting", accounting)):
        if text:
            (slurm / name).write_text(text)
    assert run_here("launch", "slurm", "--run", "run", "--status").stdout == f"{line}\n"


async def test_the_server_of_a_running_job_is_reported(shell: Shell) -> None:
    """The address and state of the server are printed once the job has written the address."""
    (shell.folder / "queue").write_text("RUNNING|None|n[1-3]|9:59\n")
    run = shell.folder / "run"
    (run / "up").mkdir(parents=True)
    (run / "slurm-job").write_text("17\n")
    command = ("launch", "slurm", "run.yaml", "--run", "run", "--status")

    async def read() -> dict[str, Any]:
        return json.loads((await shell.run(*command, "--json")).stdout)

    assert "server" not in await read()
    (run / "up" / "address").write_text(f"{shell.live.url}\n")
    shutil.copytree(shell.folder / "tugline-data", run / "server")
    assert (await read())["overview"]["url"] == shell.live.url
    output = (await shell.run(*command)).stdout
    assert output.startswith(
        f"job 17, state RUNNING, reason None, machines n[1-3], left 9:59, server {shell.live.url}"
    )
    assert "0 open" in output
    await shell.live.stop()
    silent = await read()
    assert (silent["server"], silent["overview"]) == (shell.live.url, None)


def test_a_training_configuration_is_checked(run_here: Run, slurm: Path) -> None:
    """A training is checked as by `tugline train --dry-run`; its plan goes to stderr."""
    write_config(slurm, engine={"renderer": "qwen3", "tokenizer": "model"})
    start = ("launch", "slurm", "config.json")
    command = (*start, "--nodes=2", "--engines=2", "--engine-command=serve")
    done = run_here(*command, "--dry-run", "--json")
    assert json.loads(done.stdout)["env"]["RUN"] == str(slurm / "runs" / "config")
    assert "http://MACHINE-1, http://MACHINE-2" in done.stderr
    assert "engine.urls" in run_here(*start, "--submit").stderr
    write_config(slurm, schedule={"stepps": 3})
    assert "stepps" in run_here(*command, "--submit").stderr
    assert not (slurm / "runs").exists()


def test_a_machine_without_slurm(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitting without SLURM is an error; a dry run needs none."""
    monkeypatch.setenv("PATH", "")
    assert run_here(*COMMAND, "--dry-run").returncode == 0
    done = run_here(*COMMAND, "--submit")
    error = "tugline: sbatch is not on the PATH: SLURM is missing\n"
    assert (done.returncode, done.stderr) == (2, error)
