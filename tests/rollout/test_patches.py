"""The patch of each session is stored beside its recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.test_rollout import ONCE, a_task, gateway, run_task, shell
from support.deployment import CALL
from tugline.evaluators.base import SessionOutcome
from tugline.gateway.app import Gateway
from tugline.patch import FileChange, Patch, unpack_patch
from tugline.recording.file import read
from tugline.recording.folder import PATCH
from tugline.recording.patches import describe_no_patch, load_patch
from tugline.recording.trajectories import rebuild
from tugline.types import Limits, PluginSpec, Task, Trajectory

__all__ = ["gateway"]

WORK = shell(
    f"python3 -I -c \"{CALL}\"; echo new > new.py; rm test_bill.py; printf '\\377' > raw; mkdir d"
)
CHANGES = {
    "test_bill.py": None,
    "new.py": FileChange(b"new\n"),
    "raw": FileChange(b"\xff"),
    "d": FileChange(b"", folder=True),
}


def half(_: SessionOutcome) -> float:
    """Grade anything with a half."""
    return 0.5


EVALUATORS = [
    PluginSpec("tests"),
    PluginSpec("session_completed"),
    PluginSpec("function", {"target": f"{half.__module__}:half"}),
]


async def roll(task: Task, gateway: Gateway, folder: Path) -> tuple[Trajectory, Patch | None]:
    """The result of a session, and the patch that its recording names."""
    trajectory, _ = await run_task(task, gateway, folder)
    path = gateway.describe("t-0").path
    recording = read(path)
    assert recording.result is not None
    assert trajectory.patch == recording.result.patch == rebuild(recording).patch
    if not trajectory.patch:
        assert "before its changes were collected" in describe_no_patch(recording.result)
        return trajectory, None
    assert [p.name for p in path.parent.glob(f"{PATCH}*")] == [f"{PATCH}{trajectory.patch}.zst"]
    return trajectory, unpack_patch(load_patch(path, trajectory.patch))


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=[each.name for each in EVALUATORS])
async def test_every_evaluator_s_sessions_have_a_patch(
    evaluator: PluginSpec, gateway: Gateway, tmp_path: Path
) -> None:
    """The whole work is in it: new, removed and binary files, and folders."""
    _, patch = await roll(a_task(WORK, evaluator=evaluator), gateway, tmp_path / "work")
    assert patch == Patch(CHANGES)


async def test_an_agent_that_changed_nothing_has_an_empty_patch(
    gateway: Gateway, tmp_path: Path
) -> None:
    """An empty patch differs from none: the work was collected."""
    trajectory, patch = await roll(a_task(ONCE), gateway, tmp_path / "work")
    assert trajectory.patch
    assert patch == Patch()


async def test_a_session_whose_evaluation_failed_has_its_patch(
    gateway: Gateway, tmp_path: Path
) -> None:
    """The work of a session without a verdict can be judged later."""
    failing = PluginSpec("function", {"target": "builtins:iter"})
    trajectory, patch = await roll(a_task(WORK, evaluator=failing), gateway, tmp_path / "work")
    assert trajectory.reward is None
    assert patch == Patch(CHANGES)


async def test_the_work_of_an_agent_that_ran_out_of_time_is_stored(
    gateway: Gateway, tmp_path: Path
) -> None:
    """The exit is recorded with it."""
    slow = shell(f'echo new > new.py; python3 -I -c "{CALL}"; sleep 60')
    task = a_task(slow, limits=Limits(agent_s=2.0))
    _, patch = await roll(task, gateway, tmp_path / "work")
    assert patch == Patch({"new.py": FileChange(b"new\n")})
    result = read(gateway.describe("t-0").path).result
    assert result is not None
    assert result.exit is not None
    assert result.exit.timed_out


async def test_a_session_that_ended_earlier_says_that_it_has_no_patch(
    gateway: Gateway, tmp_path: Path
) -> None:
    """A setup that fails leaves no work."""
    broken = PluginSpec("shell", {"setup": "exit 3", "command": ["true"]})
    trajectory, patch = await roll(a_task(broken), gateway, tmp_path / "work")
    assert (trajectory.patch, patch) == ("", None)
