"""Every preset does a whole task, in every kind of sandbox: from a bug to a reward."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.containers import BUSYBOX, DEBIAN, podman  # noqa: F401 - a fixture
from tugline.cli.harness_check import CASES, Case, cases_of
from tugline.gateway.app import Gateway
from tugline.harnesses.preset import start_once
from tugline.plugins import find
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.rollout.stages import StageSlots
from tugline.sandbox.container import Container
from tugline.testing import Reply, ScriptedModel, ScriptedTurn, serve_scripted_model
from tugline.types import Cause, Limits, PluginSpec, Session, Status, Task, Trajectory

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]
INSTRUCTION = "Fix the bug in bill.py: the total of 2 and 3 is 5."
FILES = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "test_bill.py": "from bill import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n",
}
LAST_WORDS = "The bill is right now."
PARTS = Parts()


def script(case: Case) -> tuple[ScriptedTurn, ...]:
    """Read the file, change it, answer."""
    end = (case.call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),)
    return (
        ScriptedTurn("I look at it.", calls=(case.call("cat bill.py"),)),
        # Qwen Code refuses `sed -i` for a file that its own tool did not read.
        ScriptedTurn("I mend it.", calls=(case.call("sed s/-/+/ bill.py > new; mv new bill.py"),)),
        ScriptedTurn(LAST_WORDS, calls=end if case.ends_by_command else ()),
    )


@pytest.fixture(
    params=[
        "bubblewrap",
        pytest.param("container", marks=[pytest.mark.podman, pytest.mark.nightly]),
    ],
    scope="module",
)
def runtime(request: pytest.FixtureRequest) -> PluginSpec:
    """A runtime that isolates agents."""
    options = {}
    if request.param == "container":
        options = {"engine": request.getfixturevalue("podman"), "image": DEBIAN}
    part = PluginSpec(request.param, options)
    reason = PARTS.runtime(part).check_available()
    if reason is not None:
        pytest.skip(reason)
    return part


@pytest.fixture(params=sorted({case.harness for case in CASES}))
def case(request: pytest.FixtureRequest) -> Case:
    """Each preset, in its first dialect."""
    return cases_of(request.param)[0]


@contextlib.asynccontextmanager
async def pause_until(slots: StageSlots, player: ScriptedModel, turns: int) -> AsyncIterator[None]:
    """Pause the timeout of the agent until the model has answered so many turns."""

    async def release() -> None:
        while len(player.answers) < turns:  # noqa: ASYNC110 - the model has no event
            await asyncio.sleep(0.02)
        slots.pause_timeout(paused=False)

    slots.pause_timeout(paused=True)
    releasing = asyncio.create_task(release())
    try:
        yield
    finally:
        releasing.cancel()


async def run_task(
    case: Case, runtime: PluginSpec, folder: Path, *, stalls: bool = False
) -> Trajectory:
    """A whole rollout; with `stalls` the model never answers its second turn."""
    faults = {1: Reply(first_s=600.0)} if stalls else {}
    task = Task(
        id="t",
        instruction=INSTRUCTION,
        harness=PluginSpec(case.harness, case.options),
        runtime=runtime,
        evaluator=PluginSpec("tests"),
        files=FILES,
        limits=Limits(agent_s=0.5 if stalls else 120.0, eval_s=60.0),
    )
    async with serve_scripted_model({INSTRUCTION: script(case)}, faults) as model:
        gateway = Gateway(model.upstream, model.rendering, folder / "recordings")
        slots = StageSlots(200.0)
        held = pause_until(slots, model.model, 2) if stalls else contextlib.nullcontext()
        async with gateway, held:
            return await roll_out(
                task,
                Session(id="t-0", task="t", sample=0),
                gateway=gateway,
                directory=folder / "session",
                parts=PARTS,
                slots=slots,
            )


async def test_the_right_patch_earns_its_reward(
    case: Case, runtime: PluginSpec, tmp_path: Path
) -> None:
    """The program edits files in its sandbox, its patch passes in another, its log is kept."""
    done = await run_task(case, runtime, tmp_path)
    logs = tmp_path / "session" / "agent" / "logs"
    assert done.failure is None, (logs / "agent.log").read_text()
    assert done.status is Status.COMPLETED
    assert done.reward.value == 1.0, done.report
    assert done.ledger.balanced
    assert len(done.traces) == 1
    patterns = find("harness", case.harness)(**case.options).log_globs
    kept = [path for pattern in patterns for path in (logs / "home").glob(pattern)]
    assert any(LAST_WORDS in path.read_text(errors="replace") for path in kept)


@pytest.mark.nightly
async def test_a_timeout_keeps_what_was_sampled(
    case: Case, runtime: PluginSpec, tmp_path: Path
) -> None:
    """The model stalls in the second turn: the first is traced and evaluated."""
    done = await run_task(case, runtime, tmp_path, stalls=True)
    assert done.status is Status.TIMED_OUT, done.failure
    assert done.failure.cause is Cause.AGENT_TIMEOUT
    assert done.ledger.trained > 0
    assert done.ledger.balanced
    assert done.reward.value == 0.0


@pytest.mark.nightly
@pytest.mark.podman
async def test_a_minimal_image_is_enough(case: Case, podman: str) -> None:  # noqa: F811
    """An image with busybox alone, without a C library, runs the program."""
    harness = PARTS.harness(PluginSpec(case.harness, case.options))
    await harness.install()
    await start_once(harness, Container(engine=podman, image=BUSYBOX))
