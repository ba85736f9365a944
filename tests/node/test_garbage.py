"""Sessions leave no cycles of references, however they end: a node may never collect them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from support.deployment import CALL
from support.engine import reply_with
from support.garbage import count_cycles
from support.gateway import open_session
from support.node import open_plane
from support.polling import until
from tugline.node.app import Node
from tugline.node.settings import NodeSettings
from tugline.rollout.parts import Parts
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.types import Group, Limits, PluginSpec, Task

TAP = {"command": ["sh", "-c", "echo 'ok 1 - a'; echo 1..1"], "format": "tap"}
LOOP = {"command": ["sleep", "60"], "format": "tap", "timeout_s": 0.5}
TESTS = Task(
    id="t",
    instruction="Ask once.",
    harness=PluginSpec("shell", {"command": ["python3", "-I", "-c", CALL]}),
    evaluator=PluginSpec("tests", TAP),
    group=Group(attempts=1, retry_s=0.0),
)
NOWHERE = PluginSpec("container", {"engine": "unix:///nonesuch.sock", "image": "x"})
ENDS: dict[str, dict[str, Any]] = {
    "completed": {},
    "without isolation": {"runtime": PluginSpec("local")},
    "out of time at the start": {"limits": Limits(init_s=0.001)},
    "out of time": {
        "limits": Limits(agent_s=0.3),
        "harness": PluginSpec("shell", {"command": ["sleep", "60"]}),
    },
    **{
        f"out of {time_s} s in all": {"limits": Limits(total_s=time_s)}
        for time_s in (0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5)
    },
    "tests out of time": {"evaluator": PluginSpec("tests", LOOP)},
    "no sandbox": {"runtime": NOWHERE},
    "a broken builder": {"builder": PluginSpec("support.failing_plugins:Broken")},
    "a broken evaluator": {"evaluator": PluginSpec("support.failing_plugins:Crashing")},
    "a report that is no text": {"evaluator": PluginSpec("support.failing_plugins:Unencodable")},
}


@pytest.fixture
def _bubblewrap() -> None:
    if reason := Bubblewrap().check_available():
        pytest.skip(reason)


@pytest.mark.usefixtures("_bubblewrap")
async def test_ended_sessions_leave_no_cycles(tmp_path: Path) -> None:
    """A real node with real sandboxes leaves no reference cycle, however sessions end."""
    async with (
        open_plane(tmp_path, 60.0) as control,
        open_session(tmp_path / "gw", reply_with("Hi.")) as model,
    ):
        settings = NodeSettings(name="n", slots=4, memory_floor_mb=0, disk_floor_gb=0.0)
        node = Node(control.dispatcher, model.gateway, Parts(), tmp_path / "node", settings)
        running = asyncio.create_task(node.run())

        async def run_all(name: str) -> None:
            before = node.stats.committed
            ends = enumerate(ENDS.values())
            await control.submit([replace(TESTS, id=f"{name}{n}", **end) for n, end in ends])
            await until(lambda: node.stats.committed == before + len(ENDS), 60)
            await until(lambda: not node.runner.sessions)
            await asyncio.sleep(0.3)  # threads hold their last function for a moment

        await run_all("first")
        with count_cycles() as cycles:
            await run_all("second")
        running.cancel()
        await asyncio.wait({running})
    assert not cycles
