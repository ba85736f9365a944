"""Scripted sessions, recorded through the same gateway and harness as real ones.

The warm start must know the harness's world as it is: its system prompt, its tool schemas, the
words its tools answer with. So an expert's script plays the policy (a `ScriptedEngine`), the real
harness does what it says, and what is captured is what the model is shown in supervised training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tugline.chat.tokenizer import Tokenizer
from tugline.demo.family import Problem, Turn
from tugline.demo.live import Live
from tugline.demo.rig import rig
from tugline.demo.settings import DemoSettings
from tugline.demo.tasks import as_task
from tugline.demo.tokenizer import END_OF_TURN
from tugline.demo.warm_start import sampled as said_ids
from tugline.testing.scripted_engine import Reply, ScriptedEngine
from tugline.types import Call, Ids, Trajectory


async def record(
    scripts: Sequence[tuple[Problem, Sequence[Turn]]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: DemoSettings,
    live: Live,
) -> tuple[list[Trajectory], dict[str, tuple[Call, ...]]]:
    """Play each script in a session of its own; returns trajectories and recorded calls."""
    tasks = [
        as_task(settings, f"script-{i:04d}", problem, samples=1)
        for i, (problem, _) in enumerate(scripts)
    ]
    turns = {f"{task.id}-0": script for task, (_, script) in zip(tasks, scripts, strict=True)}

    def reply(_prompt: Ids, request_id: str) -> Reply:
        session, number = _place(request_id)
        return Reply(said_ids(turns[session][number], tokenizer).tolist())

    engine = ScriptedEngine(
        reply,
        vocab_size=tokenizer.size,
        max_model_len=settings.window,
        eos_ids=[END_OF_TURN],
    )
    async with rig(engine, tokenizer, folder, slots=settings.slots) as up:
        trajectories = await up.run(tasks, live.sessions)
        return trajectories, await up.recorded([task.id for task in tasks])


def _place(request_id: str) -> tuple[str, int]:
    """Session and number of the call that the gateway named ``<kind>-<session>-<number>``."""
    session, _, number = request_id.partition("-")[2].rpartition("-")
    return session, int(number)
