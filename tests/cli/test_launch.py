"""A run as a job of SLURM, with stand-ins for its programs; tests/cluster has the real ones."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.conftest import Done, Shell
from served import TOKENS
from training_run import write_config

Run = Callable[..., Done]
PROGRAMS = Path(__file__).parent / "slurm"
TASK = (
    "{id: t, instruction: x, harness: {name: shell, options: {command: ['true']}},"
    " evaluator: session_completed}"
)
WORDS = ("launch", "slurm", "--tasks", "t.yaml", "--run", "run")


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task; what SLURM knows of a job is in its files `queue` and `accounting`."""
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    monkeypatch.setenv("SLOTS", "99")
    (tmp_path / "t.yaml").write_text(TASK)
    return tmp_path


def submitted(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and options of the last `sbatch`."""
    lines = (folder / "submitted").read_text().splitlines()
    options = lines[lines.index("--parsable") :]
    return dict(line.partition("=")[::2] for line in lines[: -len(options)]), options


def test_a_dry_run_prints_what_would_be_submitted(run_here: Run, slurm: Path) -> None:
    """A shell that is given the lines submits what `--submit` does; nothing else happens."""
    more = ("--nodes=3", "--time=60", "--engines=1", "--engine-command=serve --port $PORT",
            "--sbatch", "--partition=main --qos=low", "--set", "STOP_S=5")  # fmt: skip
    dry = run_here(*WORDS, *more, "--dry-run")
    assert not (slurm / "run").exists()
    subprocess.run(["bash", "-c", dry.out], cwd=slurm, check=True, env={**os.environ, "SLOTS": ""})
    pasted, options = submitted(slurm)
    assert run_here(*WORDS, *more, "--submit").code == 0
    env, again = submitted(slurm)
    assert again == options
    assert options[1:3] == ["--nodes=3", "--time=60"]
    assert options[4:6] == ["--partition=main", "--qos=low"]
    assert Path(options[-1]).read_text().startswith("#!/bin/bash")
    wanted = {
        "CONFIG": "", "TASKS": "t.yaml", "RUN": str(slurm / "run"), "ENGINES": "1", "STOP_S": "5",
        "ENGINE": "serve --port $PORT", "SLOTS": "",
    }  # fmt: skip
    assert {name: env[name] for name in wanted} == wanted
    assert {name: pasted.get(name, "") for name in wanted} == wanted


def test_a_run_has_one_job_at_a_time(run_here: Run, slurm: Path) -> None:
    """A second one is refused until SLURM says that the first has ended."""
    first = run_here(*WORDS, "--submit", "--json")
    assert json.loads(first.out)["job"] == "17"
    assert (slurm / "run" / "slurm-job").read_text() == "17\n"
    (slurm / "submitted").unlink()
    (slurm / "queue").write_text("PENDING|Resources||1:00:00\n")
    refused = run_here(*WORDS, "--submit")
    assert (refused.code, refused.err) == (
        2, f"tugline: job 17 of {slurm}/run is PENDING; scancel ends it\n"
    )  # fmt: skip
    assert not (slurm / "submitted").exists()
    (slurm / "queue").unlink()
    shown = run_here(*WORDS, "--submit").out
    assert f"job 17\ntugline launch slurm --run {slurm}/run --status\n" in shown


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
    """It is the queue's, then the accounting's, if the cluster has one."""
    assert run_here(*WORDS, "--submit").code == 0
    for name, text in (("queue", queue), ("accounting", accounting)):
        if text:
            (slurm / name).write_text(text)
    assert run_here("launch", "slurm", "--run", "run", "--status").out == f"{line}\n"


async def test_the_server_of_a_running_job_is_shown(shell: Shell) -> None:
    """Its address and state, once the job has written them."""
    (shell.folder / "queue").write_text("RUNNING|None|n[1-3]|9:59\n")
    run = shell.folder / "run"
    (run / "up").mkdir(parents=True)
    (run / "server").mkdir()
    (run / "slurm-job").write_text("17\n")
    words = ("launch", "slurm", "run.yaml", "--run", "run", "--status")

    async def read() -> dict[str, Any]:
        report: dict[str, Any] = json.loads((await shell.run(*words, "--json")).out)
        return report

    assert "server" not in await read()
    (run / "up" / "address").write_text(f"{shell.house.url}\n")
    (run / "server" / "server.json").write_bytes(msgspec.json.encode({"url": shell.house.url}))
    (run / "server" / "tokens.json").write_bytes(msgspec.json.encode(TOKENS))
    assert (await read())["overview"]["url"] == shell.house.url
    shown = (await shell.run(*words)).out
    assert shown.startswith(
        f"job 17, state RUNNING, reason None, machines n[1-3], left 9:59, server {shell.house.url}"
    )
    assert "0 open" in shown
    await shell.house.stop()
    silent = await read()
    assert (silent["server"], silent["overview"]) == (shell.house.url, None)


def test_a_run_of_training_is_checked(run_here: Run, slurm: Path) -> None:
    """As by `tugline train --dry-run`: what it would do goes to stderr, a mistake ends it."""
    write_config(slurm, engine={"renderer": "qwen3", "tokenizer": "model"})
    start = ("launch", "slurm", "config.json")
    words = (*start, "--nodes=2", "--engines=2", "--engine-command=serve")
    done = run_here(*words, "--dry-run", "--json")
    assert json.loads(done.out)["env"]["RUN"] == str(slurm / "runs" / "config")
    assert "http://MACHINE-1, http://MACHINE-2" in done.err
    assert "engine.urls" in run_here(*start, "--submit").err
    write_config(slurm, schedule={"stepps": 3})
    assert "stepps" in run_here(*words, "--submit").err
    assert not (slurm / "runs").exists()


def test_a_machine_without_slurm(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said; a dry run needs none."""
    monkeypatch.setenv("PATH", "")
    assert run_here(*WORDS, "--dry-run").code == 0
    done = run_here(*WORDS, "--submit")
    assert (done.code, done.err) == (2, "tugline: sbatch is not on the PATH: SLURM is missing\n")
