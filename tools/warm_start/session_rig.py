"""Engine, gateway, server and node for recorded sessions, in one process.

They use the same interfaces as on several machines; `rig` starts and stops them in order.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.demo.run import DemoSettings, harness_spec
from tugline.demo.tasks import RepairProblem
from tugline.errors import EngineError
from tugline.inference.base import GenerationEngine
from tugline.launch.engine import serve_engine
from tugline.launch.garbage import freeze_gc
from tugline.launch.local import LocalServer, OnDone, open_local
from tugline.launch.settings import GatewaySettings, Settings
from tugline.node.settings import NodeSettings
from tugline.recording import file as recordings
from tugline.server.settings import ServerSettings
from tugline.types import Call, Group, Limits, PluginSpec, Sampling, Task, Trajectory

MODEL = "tugline-demo"
LEASE_S = 120.0
"""Long, because this process renews no lease while it trains."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The running system."""

    cluster: LocalServer

    async def run(self, tasks: list[Task], on_done: OnDone) -> list[Trajectory]:
        """Roll out `tasks`. Raises `EngineError` if all sessions failed."""
        results = await self.cluster.run(tasks, on_done)
        failures = [one.failure for one in results if one.failure is not None]
        if results and len(failures) == len(results):
            first = failures[0]
            msg = f"all sessions failed; the first one in the {first.boundary}: {first.message}"
            raise EngineError(msg)
        return results

    async def recorded(self, task_ids: list[str]) -> dict[str, tuple[Call, ...]]:
        """Read the calls of these tasks' sessions from their recordings, by session."""
        paths = await self.cluster.find_recordings(task_ids)
        return {one: recordings.read(path).calls for one, path in paths.items()}


class ProgressLines:
    """Prints the current activity, and every tenth session."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def phase(self, text: str) -> None:
        """Print the current activity."""
        self._console.print(text, markup=False, soft_wrap=True)

    def sessions(self, done: int, total: int) -> None:
        """Print the progress of sessions."""
        if done % 10 == 0:
            self.phase(f"  session {done} of {total}")


def rendering(tokenizer: Tokenizer) -> Rendering:
    """Return the demo model's template: that of Qwen3, with reasoning kept in context."""
    return Rendering(tokenizer, "qwen3", thinking_retention="all")


@contextlib.asynccontextmanager
async def rig(
    engine: GenerationEngine, tokenizer: Tokenizer, folder: Path, *, slots: int, port: int = 0
) -> AsyncIterator[Rig]:
    """Start everything in `folder`; clean up the remains of a killed run first."""
    settings = Settings(
        server=ServerSettings(lease_s=LEASE_S),
        node=NodeSettings(name="demo", slots=slots),
        gateway=GatewaySettings(port=port),
    )
    async with (
        serve_engine(engine, rendering(tokenizer), name=MODEL) as connection,
        open_local(settings, folder, connection) as cluster,
    ):
        freeze_gc()
        yield Rig(cluster)


def make_task(settings: DemoSettings, name: str, problem: RepairProblem, runtime: str) -> Task:
    """Make a task of one session; its seed depends only on `name` after the dash."""
    return Task(
        id=name,
        instruction=problem.instruction,
        harness=harness_spec(settings),
        evaluator=PluginSpec("tests"),
        runtime=PluginSpec(runtime),
        builder=PluginSpec(settings.builder),
        files=problem.files,
        limits=Limits(agent_s=settings.agent_s, max_turns=settings.max_turns),
        group=Group(attempts=20),
        sampling=Sampling(
            temperature=1.0,
            top_p=1.0,
            max_tokens=settings.max_answer,
            seed=zlib.crc32(f"{settings.seed}/{name.partition('-')[2]}".encode()),
        ),
        tags=problem.tags,
    )
