"""``tugline train`` and ``sft`` as processes that are killed at several points and resume."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from cli.conftest import Run, end, kill_when, start
from support.commands import TUGLINE
from support.polling import until
from support.training import check_totals, write_config
from trainers.test_sft import write_run
from tugline.cli.training_run import SUMMARY
from tugline.client.api import Client
from tugline.inference.load import load
from tugline.protocol import RunKind
from tugline.trainers.config import CHECKPOINTS, MODEL
from tugline.trainers.groups import ROUNDS
from tugline.trainers.sinks import METRICS, read_lines

TORCHRUN = (TUGLINE.with_name("torchrun"), "--standalone", "--nproc-per-node=2", "--no-python")
TRAIN = (TUGLINE, "train", "config.json", "--out", "run")
SFT = (TUGLINE, "sft", "sft.json", "--out")


def has_metric(run: Path, key: str) -> Callable[[], bool]:
    """Whether the metrics of step 1 have a key."""
    return lambda: any(key in row for row in read_lines(run / METRICS) if row["step"] == 1)


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """A run that is killed at any point of a step trains each prompt once after it resumes.

    The last two batches are drawn by pass rate, since the first two have all four tasks.
    """
    schedule: dict[str, Any] = {"steps": 4, "tasks_per_step": 2, "samples": 2, "staleness": 1}
    schedule |= {"choose": "pass_rate", "checkpoint_every": 1}
    write_config(tmp_path, schedule=schedule, heldout={"every": 4})
    tasks = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(tasks[:4]))
    run = tmp_path / "run"
    points: dict[str, Callable[[], bool]] = {
        "while loading": (run / "config.json").exists,
        "while sampling": lambda: any((run / "recordings").glob("*")),
        "before publishing": has_metric(run, "rollout/reward"),
        "after publishing": has_metric(run, "publish/version"),
        "in a checkpoint": lambda: any((run / CHECKPOINTS).glob("*step-000001*")),
        "with a drawn batch on its way": lambda: any((run / "recordings").rglob("g0000006-*")),
    }
    for number, reached in enumerate(points.values()):
        process = await start(tmp_path, *TRAIN, *(["--resume"] if number else []))
        await kill_when(process, reached)
    out, _ = await end(await start(tmp_path, *TRAIN, "--resume", "--json"))
    state = json.loads(out)["state"]
    rows = check_totals(run, state, steps=4, sessions=16)
    assert [row["rollout/sessions"] for row in rows] == [4, 4, 4, 4]
    assert [score["step"] for score in state["scores"]] == [0, 4]
    started = {path.name.rpartition("-")[0] for path in (run / "recordings").rglob("g*.rec")}
    assert len(started) == 8, f"a batch was chosen twice: {sorted(started)}"


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_a_killed_refill_has_the_rounds_of_a_whole_run(tmp_path: Path) -> None:
    """Killed in further rounds and after them, a run submits and trains the same groups once."""
    schedule: dict[str, Any] = {"steps": 4, "tasks_per_step": 3, "samples": 2, "staleness": 1}
    schedule |= {"refill": True, "choose": "pass_rate", "checkpoint_every": 2}
    judged = {"evaluator": {"name": "function", "options": {"target": "support.training:by_name"}}}
    write_config(tmp_path, schedule=schedule, heldout={"every": 2}, template=judged)
    await end(await start(tmp_path, *TRAIN[:-1], "whole"))
    run, whole = tmp_path / "run", tmp_path / "whole"
    expected = (whole / ROUNDS).read_bytes()
    lines = expected.splitlines(keepends=True)
    rounds = [json.loads(line) for line in lines]
    further = [
        n for n, each in enumerate(rounds) if each["step"] in {r["step"] for r in rounds[:n]}
    ]
    assert len(further) >= 3

    def has_rounds(count: int) -> Callable[[], bool]:
        part = b"".join(lines[:count])
        return lambda: (run / ROUNDS).exists() and (run / ROUNDS).read_bytes().startswith(part)

    points: dict[str, Callable[[], bool]] = {
        "as the first further round is submitted": has_rounds(further[0] + 1),
        "before its update is published": has_metric(run, "rollout/reward"),
        "in another step without a checkpoint": has_rounds(further[1] + 1),
        "after a checkpoint": lambda: any((run / CHECKPOINTS).glob("step-000002")),
        "in the last further round": has_rounds(further[-1] + 1),
    }
    for number, reached in enumerate(points.values()):
        process = await start(tmp_path, *TRAIN, *(["--resume"] if number else []))
        await kill_when(process, reached)
    out, _ = await end(await start(tmp_path, *TRAIN, "--resume", "--json"))
    assert (run / ROUNDS).read_bytes() == expected
    state = json.loads(out)["state"]
    sessions = 2 * sum(len(each["tasks"]) for each in rounds)
    figures = check_totals(run, state, steps=4, sessions=sessions)
    assert [row["rollout/signal"] + row["rollout/lacking"] for row in figures] == [3.0] * 4
    plain = check_totals(whole, json.loads((whole / SUMMARY).read_text())["state"], 4, sessions)
    for row, other in zip(figures, plain, strict=True):
        names = ("reward", "groups", "signal", "rounds", "further", "lacking", "sessions")
        assert [row[f"rollout/{n}"] for n in names] == [other[f"rollout/{n}"] for n in names]
    started = [{p.name.rpartition("-")[0] for p in (folder / "recordings").rglob("g*.rec")}
               for folder in (run, whole)]  # fmt: skip
    assert started[0] == started[1]
    assert 2 * len(started[0]) == sessions


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_a_killed_run_without_a_checkpoint_runs_no_session_again(tmp_path: Path) -> None:
    """The steps since the last checkpoint are trained again, on the sessions in the store."""
    schedule = {"steps": 3, "tasks_per_step": 2, "samples": 2}
    write_config(tmp_path, schedule=schedule, heldout=None)
    run = tmp_path / "run"
    process = await start(tmp_path, *TRAIN)
    await kill_when(process, lambda: any(row["step"] == 2 for row in read_lines(run / METRICS)))
    assert not any((run / CHECKPOINTS).glob("*"))
    before = {path: path.stat().st_mtime_ns for path in (run / "recordings").rglob("g*.rec")}
    out, _ = await end(await start(tmp_path, *TRAIN, "--resume", "--json"))
    state = json.loads(out)["state"]
    check_totals(run, state, steps=3, sessions=12)
    after = {path: path.stat().st_mtime_ns for path in (run / "recordings").rglob("g*.rec")}
    assert len(after) == 12
    done = {path for path in before if path.name.startswith(("g0000000", "g0000001"))}
    assert len(done) == 4
    assert all(after[path] == before[path] for path in done)
    assert any((run / CHECKPOINTS).glob("step-000003"))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_on_two_devices_survives_the_death_of_one(tmp_path: Path) -> None:
    """All ranks end; a single process resumes from the checkpoint of a sharded adapter."""
    schedule = {"steps": 3, "tasks_per_step": 2, "samples": 2, "staleness": 1}
    schedule["checkpoint_every"] = 1
    write_config(tmp_path, schedule=schedule, fsdp=True, lora={"rank": 4}, heldout=None)
    run = tmp_path / "run"
    process = await start(tmp_path, *TORCHRUN, *TRAIN)
    while not (run / CHECKPOINTS / "step-000001").exists():
        assert process.returncode is None, await process.communicate()
        await asyncio.sleep(0.05)
    ranks = psutil.Process(process.pid).children()
    (follower,) = [rank for rank in ranks if rank.environ()["RANK"] == "1"]
    follower.kill()
    _, err = await end(process, 1)
    assert "exitcode: -9" in err
    out, _ = await end(await start(tmp_path, *TRAIN, "--resume", "--json"))
    check_totals(run, json.loads(out)["state"], steps=3, sessions=12)
    rows = [row for row in read_lines(run / METRICS) if "publish/version" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["publish/max_abs_dlogprob"] < 1e-4 for row in rows)


def test_a_dry_run_prints_the_plan(tmp_path: Path, run_here: Run) -> None:
    """A dry run writes nothing; a folder that holds a run needs --resume."""
    write_config(tmp_path, schedule={"staleness": 1})
    done = run_here("train", "config.json", "--dry-run", "--out", "run")
    assert done.returncode == 0, done.stderr
    plan = "3 of 2 groups, asynchronous, staleness <= 1; stale tokens are clipped: set"
    assert plan in done.stdout
    assert "sessions    12" in done.stdout
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    done = run_here("train", "config.json", "--out", "run")
    assert (done.returncode, "continue it with --resume" in done.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.nightly)])
async def test_two_processes_fine_tune_like_one(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    """With shards under torchrun, losses and the final model agree within 1e-5."""
    # a higher rate lets Adam turn the rounding of gradients near zero into steps of its own size
    config = msgspec.to_builtins(write_run(tmp_path, lr=1e-3), enc_hook=str) | {"lora": lora}
    for name, fsdp, launcher in (("one", False, ()), ("two", True, TORCHRUN)):
        (tmp_path / "sft.json").write_text(json.dumps(config | {"fsdp": fsdp}))
        await end(await start(tmp_path, *launcher, *SFT, name))
    one, two = (read_lines(tmp_path / name / METRICS) for name in ("one", "two"))
    for name in ("sft/loss", "sft/heldout_loss", "sft/grad_norm", "sft/tokens"):
        expected = [row[name] for row in one if name in row]
        assert [row[name] for row in two if name in row] == pytest.approx(expected, abs=1e-5)
    left, right = (load(tmp_path / name / MODEL)[0].state_dict() for name in ("one", "two"))
    assert all(torch.allclose(left[name], right[name], atol=1e-5) for name in left)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_a_killed_fine_tuning_resumes(tmp_path: Path) -> None:
    """After kill -9, fine-tuning makes every update once and writes a complete model."""
    config = write_run(tmp_path, epochs=20)
    (tmp_path / "sft.json").write_bytes(msgspec.json.encode(config, enc_hook=str))
    for step, more in ((4, ()), (10, ("--resume",))):
        process = await start(tmp_path, *SFT, "run", *more)
        await kill_when(process, (tmp_path / "run" / CHECKPOINTS / f"step-{step:06d}").exists)
    out, _ = await end(await start(tmp_path, *SFT, "run", "--resume", "--json"))
    state = json.loads(out)
    assert state["step"] == max(map(int, state["heldout"]))
    assert state["heldout"][str(state["step"])] < state["heldout"]["0"]
    assert (tmp_path / "run" / MODEL / "tokenizer.json").exists()


@pytest.mark.timeout(300)
async def test_a_plain_run_has_a_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, its figures, sessions and texts are served; `up --dir` opens it afterwards.

    The token of another server in the environment is not sent to it.
    """
    write_config(tmp_path, schedule={"steps": 2, "tasks_per_step": 1, "samples": 2}, heldout=None)
    run = tmp_path / "run"
    monkeypatch.setenv("TUGLINE_TOKEN", "of-another-server")
    process = await start(tmp_path, *TRAIN)
    monkeypatch.delenv("TUGLINE_TOKEN")
    await until((run / "server.json").exists, 120)
    async with Client(folder=run) as client:

        async def has_trained() -> bool:
            names = [each.name for each in await client.runs()]
            return any([await client.run_steps(name, after=0) for name in names])

        await until(has_trained, 120)
        [view] = await client.runs()
        assert (view.kind, view.ended) == (RunKind.TRAIN, None)
        session = await anext(client.sessions(run=view.name))
        await client.recording(session.id, tmp_path / "kept")
        assert list((tmp_path / "kept").glob(f"{session.id}.*.rec"))
    _, err = await end(process)
    link = (
        f"the console is at {json.loads((run / 'server.json').read_bytes())['url']}/training#token="
    )
    assert link in err
    figures: dict[int, dict[str, float]] = {1: {}, 2: {}}
    for row in read_lines(run / METRICS):
        if row["step"] in figures:
            figures[row["step"]] |= row
    again = await start(tmp_path, TUGLINE, "up", "--dir", "run", "--port", "0")
    (run / "server.json").unlink()
    await until((run / "server.json").exists, 60)
    async with Client(folder=run) as client:
        [view] = await client.runs()
        assert view.ended is not None
        reported = {each.step: each.figures for each in await client.run_steps(view.name)}
        assert {node.name for node in await client.nodes()} == {"train"}  # no other one
    for step in (1, 2):
        assert reported[step]["rollout/reward"] == figures[step]["rollout/reward"]
        assert reported[step]["time/step_s"] == figures[step]["time/step_s"]
    again.terminate()
    _, err = await end(again)
    assert "is the folder of a run" in err
