"""Rollouts with real agents: their stages, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.test_failures import FILES
from support.deployment import CALL
from support.engine import reply_in_turn
from support.failing_plugins import Uninstallable
from support.gateway import open_session
from tugline.aio import PausableTimeout
from tugline.errors import SandboxError
from tugline.gateway.app import Gateway
from tugline.rollout.parts import Parts
from tugline.rollout.rollout import roll_out
from tugline.rollout.stages import StageSlots
from tugline.sandbox.local import LocalRuntime
from tugline.types import Cause, Limits, PluginSpec, Session, Status, Task, Trajectory

ROOT = Path(__file__).parents[2]
AGENT = str(ROOT / "examples" / "agents" / "openai_loop.py")
FIX = [
    *(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in (
            ("read", {"path": "bill.py"}),
            ("edit", {"path": "bill.py", "edits": [{"oldText": "a - b", "newText": "a + b"}]}),
        )
    ),
    "Done.",
]
SESSION = Session(id="t-0", task="t", sample=0)
PI = PluginSpec("pi")
LOOP = PluginSpec("shell", {"command": ["python3", AGENT]})


def a_task(harness: PluginSpec, **changes: Any) -> Task:
    """A task with one bug."""
    given = {
        "evaluator": PluginSpec("tests"),
        "files": FILES,
        "instruction": "Fix the bug in bill.py.",
    }
    return Task(id="t", harness=harness, **{**given, **changes})


LOGIN = 'test -n "$OPENAI_API_KEY" && echo "$OPENAI_BASE_URL" > "$HOME/login"'


@pytest.mark.parametrize("runtime", ["local", "bubblewrap"])
async def test_a_setup_logs_in_before_the_agent(
    runtime: str, gateway: Gateway, tmp_path: Path
) -> None:
    """The setup runs once in the session's sandbox, with the agent's home and variables."""
    options = {"setup": LOGIN, "command": f'test -s "$HOME/login" && exec python3 {AGENT}'}
    task = a_task(PluginSpec("shell", options), runtime=PluginSpec(runtime))
    trajectory, _ = await run_task(task, gateway, tmp_path)
    assert trajectory.failure is None
    assert len(gateway.read_calls("t-0")) == len(FIX)


async def test_a_setup_that_fails_is_a_failure_of_the_harness(
    gateway: Gateway, tmp_path: Path
) -> None:
    """The agent is not started, and the end of the setup's output is in the message."""
    options = {"setup": "echo no such account; exit 3", "command": ["python3", AGENT]}
    trajectory, stages = await run_task(a_task(PluginSpec("shell", options)), gateway, tmp_path)
    assert (trajectory.status, cause_of(trajectory)) == (Status.FAILED, Cause.INSTALL)
    assert trajectory.failure is not None
    assert "ended with exit code 3: no such account" in trajectory.failure.message
    assert stages == [Status.INIT]
    assert not gateway.read_calls("t-0")


ONCE = PluginSpec("shell", {"command": ["python3", "-I", "-c", CALL]})
"""A program that calls the model once."""


def shell(script: str) -> PluginSpec:
    """An agent that is a shell script."""
    return PluginSpec("shell", {"command": ["sh", "-c", script]})


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway whose model fixes the bug."""
    async with open_session(tmp_path / "gateway", reply_in_turn(*FIX), window=200_000) as session:
        yield session.gateway


async def run_task(
    task: Task,
    gateway: Gateway,
    folder: Path,
    parts: Parts | None = None,
    slots: StageSlots | None = None,
) -> tuple[Trajectory, list[Status]]:
    """The result of a rollout, and its stages."""
    stages: list[Status] = []
    trajectory = await roll_out(
        task,
        SESSION,
        gateway=gateway,
        directory=folder,
        parts=parts or Parts(),
        on_stage=stages.append,
        slots=slots,
    )
    return trajectory, stages


def cause_of(trajectory: Trajectory) -> Cause | None:
    """The cause of a rollout's failure."""
    return trajectory.failure.cause if trajectory.failure else None


@pytest.mark.parametrize(
    "harness", [pytest.param(PI, marks=pytest.mark.pi), LOOP], ids=["pi", "loop"]
)
async def test_a_rollout_ends_with_traces_and_a_reward(
    harness: PluginSpec, gateway: Gateway, tmp_path: Path
) -> None:
    """A real agent reads and edits; each stage is timed; the ledger is balanced.

    The whole result is checked at once, since a real agent takes seconds.
    """
    trajectory, stages = await run_task(a_task(harness), gateway, tmp_path)
    assert trajectory.failure is None
    assert trajectory.status is Status.COMPLETED
    assert trajectory.reward is not None
    assert trajectory.reward.value == 1.0, trajectory.report
    assert len(trajectory.traces) == 1
    assert trajectory.ledger.balanced
    assert trajectory.ledger.trained == trajectory.ledger.sampled > 0
    assert set(trajectory.seconds) == {"init", "ready", "run", "build", "eval"}
    assert stages == [Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL]
    first, _, third = gateway.read_calls("t-0")
    assert first.messages[-1].content == "Fix the bug in bill.py."
    # Both agents have the same tools, so that a model can be used with either.
    assert third.messages[-1].content == "Successfully replaced 1 block(s) in bill.py."
    assert {"read", "bash", "edit"} <= {tool.name for tool in first.tools}


@pytest.mark.pi
@pytest.mark.parametrize(
    "instruction", ["@bill.py is broken", "--help me", "-p", "two\nlines 'q' $X"]
)
async def test_pi_has_any_instruction_as_text(
    instruction: str, gateway: Gateway, tmp_path: Path
) -> None:
    """An instruction that looks like a file or an option is text, too."""
    trajectory, _ = await run_task(a_task(PI, instruction=instruction), gateway, tmp_path)
    assert trajectory.failure is None
    assert gateway.read_calls("t-0")[0].messages[-1].content.lstrip(" ") == instruction


class Given(Parts):
    """Parts of which some are set by the test."""

    def __init__(self, **given: object) -> None:
        super().__init__()
        self.given = given

    def _make(self, kind: str, part: PluginSpec, contract: type[Any]) -> Any:
        return self.given[kind] if kind in self.given else super()._make(kind, part, contract)


async def test_a_full_disk_is_not_a_failure_of_the_agent(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that filled up while the agent ran is a failure of the infrastructure."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    trajectory, _ = await run_task(a_task(ONCE), gateway, tmp_path)
    assert cause_of(trajectory) is Cause.DISK
    assert trajectory.ledger.sampled > 0


class NoEvalSlot(StageSlots):
    """A node where no slot for EVAL is ever free."""

    @contextlib.asynccontextmanager
    async def acquire(self, status: Status) -> AsyncIterator[None]:
        """Wait in EVAL."""
        await asyncio.sleep(60 if status is Status.EVAL else 0)
        yield


class RecordedSlots(StageSlots):
    """Records the order in which slots are acquired and the agent's timeout starts."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[object] = []

    @contextlib.asynccontextmanager
    async def acquire(self, status: Status) -> AsyncIterator[None]:
        """Never wait."""
        self.events.append(status)
        yield

    def start_agent_timeout(self, limit_s: float) -> PausableTimeout:
        """Record the start."""
        self.events.append(limit_s)
        return super().start_agent_timeout(limit_s)


async def test_time_in_ready_does_not_count_towards_agent_s(
    gateway: Gateway, tmp_path: Path
) -> None:
    """The agent's timeout starts once the session holds a slot of RUN, not while it waits."""
    slots = RecordedSlots()
    await run_task(a_task(ONCE, limits=Limits(agent_s=60.0)), gateway, tmp_path, slots=slots)
    assert slots.events == [Status.INIT, Status.RUN, 60.0, Status.BUILD, Status.EVAL]


async def test_waiting_for_an_eval_slot_has_its_own_cause(gateway: Gateway, tmp_path: Path) -> None:
    """A session whose `total_s` ends while it waits names the waiting as the cause."""
    trajectory, _ = await run_task(a_task(ONCE), gateway, tmp_path, slots=NoEvalSlot(4.0))
    assert trajectory.status is Status.TIMED_OUT
    assert cause_of(trajectory) is Cause.WAIT_TIMEOUT


class SlowInstall(Uninstallable):
    """Fails after a while, and records how much of `total_s` is used meanwhile."""

    def __init__(self, slots: StageSlots) -> None:
        self.slots = slots
        self.used: list[float] = []

    async def install(self) -> None:
        """Record the used time twice, then fail."""
        for _ in range(2):
            self.used.append(self.slots.cancel_scope.elapsed)
            await asyncio.sleep(0.01)
        await super().install()


async def test_an_installation_does_not_count_towards_total_s(
    gateway: Gateway, tmp_path: Path
) -> None:
    """The used time stands still during an installation and continues after it."""
    slots = StageSlots(60.0)
    harness = SlowInstall(slots)
    trajectory, _ = await run_task(a_task(ONCE), gateway, tmp_path, Given(harness=harness), slots)
    assert cause_of(trajectory) is Cause.INSTALL
    before, after = harness.used
    assert before == after
    assert slots.cancel_scope.elapsed > after


async def test_errors_of_list_weaknesses_are_ignored() -> None:
    """The runtime is called again until it succeeds."""
    results = [SandboxError("cannot write to the cache"), None]

    def list_weaknesses() -> tuple[str, ...]:
        if (error := results.pop(0)) is not None:
            raise error
        return ()

    parts = Given(runtime=SimpleNamespace(list_weaknesses=list_weaknesses))
    for _ in range(3):
        await parts.report_weaknesses(PluginSpec("odd"))
    assert results == []


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.3])
async def test_cancelling_ends_the_agent(delay: float, gateway: Gateway, tmp_path: Path) -> None:
    """A cancelled rollout leaves no process and no open session."""
    task = asyncio.create_task(run_task(a_task(shell("sleep 300")), gateway, tmp_path))
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "t-0" not in [live.id for live in gateway._sessions]
    assert not await asyncio.to_thread(LocalRuntime().reap, tmp_path)
