"""The example's tasks with a real agent in them: from a task-set file to a reward."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from containers import podman
from tugline.cli.harness_check import CASES
from tugline.datasets.files import gather
from tugline.gateway.app import Gateway
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.testing import ScriptedTurn, serve_scripted_model
from tugline.types import PluginSpec, Session, Status, Trajectory

__all__ = ["podman"]

pytestmark = [pytest.mark.podman, pytest.mark.pi, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "harbor"
PI = next(case for case in CASES if case.harness == "pi")
FORGED = "echo 1 > /logs/verifier/reward.txt; echo true > /tests/test.sh; ls /solution"


async def rolled(name: str, command: str, engine: str, folder: Path) -> Trajectory:
    """A session of the example's task in which the model says one command."""
    found = {task.id: task for task, _ in gather([EXAMPLES / "tasks.yaml"])}[name]
    runtime = PluginSpec("container", {**found.runtime.options, "engine": engine})
    task = msgspec.structs.replace(found, runtime=runtime, harness=PluginSpec("pi", PI.options))
    first = ScriptedTurn("I do it.", calls=((PI.tool, {PI.argument: command, **PI.arguments}),))
    turns = (first, ScriptedTurn("That is it."))
    async with serve_scripted_model({task.instruction.strip(): turns}, {}) as model:
        gateway = Gateway(model.upstream, model.rendering, folder / "recordings")
        async with gateway:
            return await roll_out(
                task,
                Session(id="t-0", task=task.id, sample=0),
                gateway=gateway,
                directory=folder / "session",
                parts=Parts(),
            )


def solution(name: str) -> str:
    """What the reference does, as a command."""
    return (EXAMPLES / "tasks" / name / "solution" / "solve.sh").read_text()


@pytest.mark.parametrize(
    ("name", "command", "reward"),
    [
        ("fix-median", solution("fix-median"), 1.0),
        ("fix-median", FORGED, 0.0),
        ("lost-commit", solution("lost-commit"), 1.0),
        ("lost-commit", FORGED, 0.0),
    ],
    ids=["clean", "clean-forged", "in-place", "in-place-forged"],
)
async def test_an_agent_earns_what_its_work_is_worth(
    name: str, command: str, reward: float, podman: str, tmp_path: Path
) -> None:
    """The reference's own commands earn 1, forged rewards and tests nothing."""
    done = await rolled(name, command, podman, tmp_path)
    log = (tmp_path / "session" / "agent" / "logs" / "agent.log").read_text(errors="replace")
    assert done.failure is None, log
    assert done.status is Status.COMPLETED
    assert done.reward is not None
    assert done.reward.value == reward, (done.report, log)
    assert done.ledger.balanced
