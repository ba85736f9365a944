"""Engine, gateway, server and node of the demo, in one process.

The parts use the same interfaces as on many machines; `rig` starts and stops them in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import EngineError
from tugline.inference.base import GenerationEngine
from tugline.inference.load import load
from tugline.launch.engine import serve_engine
from tugline.launch.local import LocalServer, OnDone, open_local
from tugline.launch.settings import GatewaySettings, ServerSettings, Settings
from tugline.node.settings import NodeSettings
from tugline.recording import file as recordings
from tugline.types import Call, Status, Task, Trajectory
from tugline.web.serve import freeze_gc

WARM_START = Path(__file__).parent / "warm_start_model"
"""The shipped start policy, a Hugging Face folder made by ``tools/warm_start/rebuild.py``.

Weights are stored in half precision; training and sampling happen in float32.
"""
MODEL = "tugline-demo"
LEASE_S = 120.0
"""Long, because this process trains between sessions and renews no lease meanwhile."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A model in float32, its tokenizer and its end-of-answer ids."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


def load_policy(folder: Path = WARM_START) -> LoadedPolicy:
    """Load the policy in `folder`. Raises `UsageError` if it is no model folder."""
    return LoadedPolicy(*load(folder, dtype=torch.float32))


def describe(model: torch.nn.Module) -> str:
    """Return architecture and size as text."""
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"{type(model).__name__.removesuffix('ForCausalLM')} architecture, {size:.1f} M parameters"
    )


@dataclass(frozen=True, slots=True)
class Rig:
    """The running system."""

    cluster: LocalServer

    async def run(self, tasks: list[Task], on_done: OnDone) -> list[Trajectory]:
        """Roll out `tasks`. Raises `EngineError` when not one session got through."""
        results = await self.cluster.run(tasks, on_done)
        failures = [one.failure for one in results if one.failure is not None]
        if results and len(failures) == len(results):
            first = failures[0]
            msg = (
                f"no session got through; the first failed in the {first.boundary}: {first.message}"
            )
            raise EngineError(msg)
        return results

    async def recorded(self, task_ids: list[str]) -> dict[str, tuple[Call, ...]]:
        """The calls of every session of these tasks that made any, from its recording."""
        paths = await self.cluster.find_recordings(task_ids)
        return {one: recordings.read(path).calls for one, path in paths.items()}


def rendering(tokenizer: Tokenizer) -> Rendering:
    """The demo model's template: Qwen3's, with reasoning kept in context."""
    return Rendering(tokenizer, "qwen3", thinking_retention="all")


@contextlib.asynccontextmanager
async def rig(
    engine: GenerationEngine, tokenizer: Tokenizer, folder: Path, *, slots: int, port: int = 0
) -> AsyncIterator[Rig]:
    """Start everything in `folder`, after cleaning up what a killed run left there."""
    settings = Settings(
        server=ServerSettings(lease_s=LEASE_S),
        node=NodeSettings(name="demo", slots=slots),
        gateway=GatewaySettings(port=port),
    )
    async with (
        serve_engine(engine, rendering(tokenizer), name=MODEL) as reached,
        open_local(settings, folder, reached) as cluster,
    ):
        freeze_gc()
        yield Rig(cluster)


def sampled(trajectories: Sequence[Trajectory]) -> int:
    """Number of tokens that these sessions sampled."""
    return sum(one.ledger.sampled for one in trajectories)


def failed(trajectories: Sequence[Trajectory]) -> int:
    """Number of sessions that failed for a reason other than the policy."""
    return sum(one.status is Status.FAILED for one in trajectories)
