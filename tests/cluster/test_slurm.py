"""Jobs of ``tugline launch slurm`` on a real SLURM cluster of three nodes.

Some are submitted by the command, others by ``sbatch``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import free_ports, make_task, until
from cluster.slurm import Slurm, find_obstacle, slurm
from support.commands import TUGLINE
from support.tokenizer import make_tokenizer
from support.training import write_config
from tugline.cli.launch import SCRIPT
from tugline.trainers.sinks import METRICS, read_lines

TESTS = Path(__file__).parents[1]
FLAGS = {f"--{name.lower()}": name for name in ("RUN", "TASKS", "SETTINGS", "ENGINES")}
FLAGS["--engine-command"] = "ENGINE"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle() or "SLURM can run"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of three nodes."""
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Run:
    """A run of tasks with the scripted engine in `folder`."""

    def __init__(self, folder: Path, tasks: int, turns: int) -> None:
        self.folder = folder
        (folder / "tokenizer.json").write_text(make_tokenizer().to_json(), encoding="utf-8")
        planned = [make_task(f"task-{number}", turns, 0.5) for number in range(tasks)]
        (folder / "tasks.json").write_text(json.dumps(planned))
        (folder / "settings.yaml").write_text(json.dumps({
            "server": {"lease_s": 5.0},
            "node": {"metrics_port": 0},  # several nodes share this machine
            "gateway": {"host": "0.0.0.0"},  # noqa: S104
            "engine": {"tokenizer": str(folder / "tokenizer.json"), "renderer": "qwen3"},
        }))  # fmt: skip
        engine = f"{sys.executable} {TESTS / 'chaos' / 'engine.py'} $PORT tokenizer.json"
        self.env = {
            "RUN": "run",
            "TASKS": "tasks.json",
            "SETTINGS": "settings.yaml",
            "ENGINES": "1",
            "ENGINE": engine,
            "ENGINE_PORT": str(free_ports(1)[0]),
            "HOST": "127.0.0.1",
            "SLOTS": "4",
            "STOP_S": "5",
            "TUGLINE": str(TUGLINE),
            "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
        }

    def start(self, cluster: Slurm, *options: str, **env: str) -> str:
        """Submit a job of this run with ``sbatch``; returns its id."""
        where = (f"--chdir={self.folder}", f"--output={self.folder}/%j.log")
        return cluster.submit(SCRIPT, *where, *options, **{**self.env, **env})

    def launch(self, cluster: Slurm, *options: str) -> Any:
        """The JSON output of ``tugline launch slurm`` for this run."""
        env = {**self.env}
        run = [f"{flag}={env.pop(name)}" for flag, name in FLAGS.items()]
        path = env.pop("PYTHONPATH")
        env.pop("TUGLINE")
        run += [argument for pair in env.items() for argument in ("--set", "=".join(pair))]
        argv = (TUGLINE, "launch", "slurm", "--json", *run, *options)
        with contextlib.chdir(self.folder):
            return json.loads(cluster.run(*argv, PYTHONPATH=path))

    def count(self, query: str, *values: str) -> int:
        """The number that a query of the server's store returns; 0 without a store."""
        path = self.folder / "run" / "server" / "server.db"
        if not path.exists():
            return 0
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
                return int(store.execute(query, values).fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    def committed(self) -> int:
        """The number of sessions with a result."""
        return self.count("SELECT count(*) FROM results")

    def held_by(self, node: str) -> int:
        """The number of sessions that a node holds."""
        return self.count("SELECT count(*) FROM sessions WHERE node LIKE ?", f"{node}.%")

    def log(self, job: str) -> str:
        """The output of a job."""
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def check(self) -> None:
        """Check that every task is released and each session has one result, which is usable."""
        store = sqlite3.connect(self.folder / "run" / "server" / "server.db")
        rows = store.execute("SELECT id, status FROM sessions").fetchall()
        results = store.execute("SELECT session FROM results").fetchall()
        open_ = store.execute("SELECT id FROM tasks WHERE released IS NULL").fetchall()
        events = store.execute(
            "SELECT session FROM events WHERE kind = 'session.result'"
        ).fetchall()
        store.close()
        assert open_ == []
        assert {status for _, status in rows} == {"completed"}
        for sessions in (results, events):
            assert Counter(session for (session,) in sessions) == Counter(name for name, _ in rows)


def has_ended(cluster: Slurm, job: str) -> bool:
    """Whether a job has ended for good."""
    return cluster.field(job, "JobState") in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


def test_a_cancelled_node_costs_no_session(cluster: Slurm, tmp_path: Path) -> None:
    """After one of three nodes is cancelled, every session is still committed exactly once."""
    run = Run(tmp_path, tasks=12, turns=4)
    options = f"--nodelist=n1 --output={tmp_path}/%j.log"
    job = run.launch(cluster, "--submit", "--sbatch", options)["job"]
    with pytest.raises(AssertionError, match=f"job {job} of .* is (PENDING|RUNNING)"):
        run.launch(cluster, "--submit")
    until(lambda: run.launch(cluster, "--status")["overview"], "the server", 120)
    state = run.launch(cluster, "--status")
    assert (state["job"], state["state"], state["machines"]) == (job, "RUNNING", "n1")
    extra = [run.start(cluster, f"--nodelist={name}", ROLE="nodes") for name in ("n2", "n3")]
    until(lambda: run.held_by("n2") and run.held_by("n3"), "work on all nodes")
    cluster.run("scancel", extra[0])
    until(lambda: has_ended(cluster, job), "the run to end", 120)
    assert cluster.field(job, "JobState") == "COMPLETED", run.log(job)
    run.check()
    assert "left" not in run.launch(cluster, "--status")
    until(lambda: has_ended(cluster, extra[1]), "the other nodes to end")
    assert cluster.field(extra[1], "JobState") == "COMPLETED", run.log(extra[1])


def test_a_run_outlives_its_walltime(cluster: Slurm, tmp_path: Path) -> None:
    """Before its walltime a job stops and is requeued; the requeued job finishes the run."""
    run = Run(tmp_path, tasks=10, turns=8)
    job = run.start(cluster, "--nodes=3", "--time=1", "--signal=B:USR1@45")
    until(lambda: run.log(job).count("queued again") == 1, "the walltime", 90)
    before = run.committed()
    assert before < 40, f"{before} of 40 sessions were committed when its time ended"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    until(lambda: has_ended(cluster, job), "the run to end", 150)
    assert cluster.field(job, "JobState") == "COMPLETED", run.log(job)
    assert int(cluster.field(job, "Restarts")) >= 1
    run.check()


@pytest.mark.slow
def test_training_resumes_after_its_job_was_requeued(cluster: Slurm, tmp_path: Path) -> None:
    """After the walltime signal, trainer, server, nodes and engine resume in the new job."""
    run = Run(tmp_path, tasks=1, turns=1)
    engine = {"renderer": "qwen3", "tokenizer": "model"}
    plan = {"steps": 6, "tasks_per_step": 2, "samples": 2}
    write_config(tmp_path, engine=engine, schedule=plan, heldout=None)
    settings = {"engine": {"renderer": "qwen3", "tokenizer": str(tmp_path / "model")}}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    command = f"{sys.executable} {TESTS / 'engines' / 'embedded_server.py'} model $PORT vllm"
    run.env |= {"CONFIG": "config.json", "TASKS": "", "ENGINE": command, "OMP_NUM_THREADS": "1"}
    job = run.start(cluster, "--nodes=2")
    metrics = tmp_path / "run" / "train" / METRICS

    def steps() -> list[int]:
        return [row["step"] for row in read_lines(metrics)] if metrics.exists() else []

    until(lambda: max(steps(), default=0) >= 2, "the second step", 100)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: has_ended(cluster, job), "the run to end", 150)
    assert cluster.field(job, "JobState") == "COMPLETED", run.log(job)
    assert int(cluster.field(job, "Restarts")) == 1
    assert max(steps()) == 6
    assert run.count("SELECT count(*) FROM sessions") == run.committed() == 24
