"""Recorded sessions are judged again as a rollout would judge them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollout.test_rollout import SESSION, a_task, gateway, run_task, shell
from support.deployment import CALL
from support.recorded import FILES, REPAIRED, WORKS, function, record
from support.tasks import make_task
from tugline.evaluators.base import Verdict
from tugline.gateway.app import Gateway
from tugline.patch import Patch, unpack_patch
from tugline.recording.file import read
from tugline.recording.patches import load_patch
from tugline.rollout.parts import Parts
from tugline.rollout.rejudge import judge_again, refuse_evaluator, refuse_session, run_judging
from tugline.rollout.stages import StageSlots
from tugline.types import (
    Cause,
    Limits,
    PluginSpec,
    RecordingRef,
    Reward,
    Session,
    Status,
    Task,
    Trajectory,
)

__all__ = ["gateway"]

OWN = PluginSpec("tests")
EVALUATORS = [OWN, PluginSpec("session_completed"), function("count_changes")]


def write_work(name: str) -> str:
    """A script that makes a patch of `WORKS`, after a model call."""
    files = {path: change.data for path, change in WORKS[name].files.items() if change}
    return f"{CALL}for path, data in {files!r}.items(): open(path, 'wb').write(data)\n"


def a_worker(name: str) -> PluginSpec:
    """An agent that makes a patch of `WORKS`."""
    return PluginSpec("shell", {"command": ["python3", "-I", "-c", write_work(name)]})


async def judge(gateway: Gateway, spec: PluginSpec, folder: Path) -> Verdict:
    """Judge the session that `gateway` recorded again."""
    path = gateway.describe(SESSION.id).path
    recording = read(path)
    assert not refuse_session(recording)
    assert recording.result is not None
    patch = unpack_patch(load_patch(path, recording.result.patch))
    return await judge_again(recording, patch, spec, folder, Parts())


def plain(outcome: Verdict | Trajectory) -> tuple[Reward | None, str]:
    """Reward and report, without the times of programs, which differ each time."""
    report = {key: value for key, value in outcome.report.items() if key != "seconds"}
    return outcome.reward, re.sub(r"[0-9.]+ ?s\b", "", json.dumps(report))


async def roll(task: Task, gateway: Gateway, folder: Path) -> Trajectory:
    """Run an agent to a verdict."""
    trajectory, _ = await run_task(task, gateway, folder)
    assert trajectory.reward is not None, trajectory.failure
    return trajectory


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=[each.name for each in EVALUATORS])
async def test_the_same_evaluator_gives_the_same_verdict(
    evaluator: PluginSpec, gateway: Gateway, tmp_path: Path
) -> None:
    """Reward, parts and report are equal: the evaluator gets what it got in the rollout."""
    task = a_task(a_worker("right"), evaluator=evaluator, files=FILES | REPAIRED)
    trajectory = await roll(task, gateway, tmp_path / "run")
    assert plain(await judge(gateway, evaluator, tmp_path / "again")) == plain(trajectory)


async def test_an_evaluator_gets_the_recorded_timeout(gateway: Gateway, tmp_path: Path) -> None:
    """An evaluator of how the session ended gets the same end."""
    spec = PluginSpec("session_completed")
    slow = shell(f'python3 -I -c "{CALL}"; sleep 60')
    task = a_task(slow, evaluator=spec, limits=Limits(agent_s=2.0))
    trajectory = await roll(task, gateway, tmp_path / "run")
    assert trajectory.reward == Reward(0.0)
    assert plain(await judge(gateway, spec, tmp_path / "again")) == plain(trajectory)


@pytest.mark.parametrize("work", WORKS)
async def test_a_repaired_test_judges_as_in_a_fresh_rollout(
    work: str, gateway: Gateway, tmp_path: Path
) -> None:
    """A session under a wrong test, judged again, has the verdict of one under the right test."""
    repaired = PluginSpec("tests", {"files": REPAIRED})
    task = a_task(a_worker(work), files=FILES)
    await roll(task, gateway, tmp_path / "wrong")
    again = await judge(gateway, repaired, tmp_path / "again")
    fresh = await roll(replace(task, evaluator=repaired), gateway, tmp_path / "right")
    assert plain(again) == plain(fresh)
    assert again.reward.value == float(work == "right")


def test_a_refused_session_says_why(tmp_path: Path) -> None:
    """Sessions without a patch, a verdict's stage or a result are refused, and so is `in_place`."""
    old = read(record(tmp_path, "old-0"))
    assert refuse_session(old) == "it was recorded by a version that stored no patches"
    early = read(record(tmp_path, "early-0", Patch(), seconds={"run": 1.0}))
    assert "was not evaluated" in refuse_session(early)
    running = read(record(tmp_path, "running-0", Patch()))
    running.results = ()
    assert refuse_session(running) == "no result is recorded"
    cancelled = read(record(tmp_path, "cancelled-0", Patch()))
    assert cancelled.result is not None
    cancelled.results = (replace(cancelled.result, status=Status.CANCELLED),)
    assert "cancelled" in refuse_session(cancelled)
    assert not refuse_session(read(record(tmp_path, "fine-0", Patch())))
    evaluator = Parts().evaluator(OWN)
    assert not refuse_evaluator(OWN, evaluator)
    evaluator.in_place = True
    assert "in_place" in refuse_evaluator(OWN, evaluator)


# --------------------------------------------------------------------------- on a node
def name_recording(node: str = "home", epoch: int = 1) -> Task:
    """A task that judges the session ``right-0``, recorded on a node."""
    recorded = RecordingRef(session="right-0", epoch=epoch, node=node, digest="d")
    evaluator = PluginSpec("tests", {"files": REPAIRED})
    return make_task("again", evaluator=evaluator, judges=recorded)


async def run_on_node(task: Task, folder: Path, slots: StageSlots) -> Trajectory:
    """Judge as a node does, with the recordings of `folder`."""
    return await run_judging(
        task,
        Session(id="again-0", task="again", sample=0),
        recordings=folder,
        directory=folder / "work",
        parts=Parts(),
        on_stage=lambda _status: None,
        slots=slots,
    )


async def test_a_node_goes_straight_to_the_evaluation(tmp_path: Path) -> None:
    """The result has the verdict, no token, and no other stage."""
    record(tmp_path, "right-0", WORKS["right"])
    result = await run_on_node(name_recording(), tmp_path, StageSlots())
    assert (result.status, result.failure) == (Status.COMPLETED, None)
    assert list(result.seconds) == ["eval"]
    assert result.reward is not None
    assert (result.reward.value, result.traces, result.ledger.sampled) == (1.0, (), 0)


async def test_a_node_without_the_recording_says_where_it_was(tmp_path: Path) -> None:
    """The failure is retried, and names session, node and file; nothing is judged."""
    record(tmp_path, "right-0", WORKS["right"])
    result = await run_on_node(name_recording(epoch=2), tmp_path, StageSlots())
    assert result.failure is not None
    assert (result.status, result.failure.cause) == (Status.FAILED, Cause.RECORDING)
    assert "session right-0 was recorded on node 'home'" in result.failure.message
    assert str(tmp_path / "right-0.2.rec") in result.failure.message


async def test_a_cancelled_judging_has_no_verdict(tmp_path: Path) -> None:
    """It ends like a cancelled rollout."""
    record(tmp_path, "right-0", WORKS["right"])
    slots = StageSlots()
    slots.cancel_scope.cancel()
    result = await run_on_node(name_recording(), tmp_path, slots)
    assert (result.status, result.reward) == (Status.CANCELLED, None)
