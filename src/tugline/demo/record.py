"""Scripted sessions, recorded through the same gateway and harness as real ones.

The warm start must know the harness's world as it is: its system prompt, its tool schemas, the
words its tools answer with. So an expert's script plays the policy (a `ScriptedEngine`), the real
harness does what it says, and what is captured is what the model is shown in supervised training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tugline.demo.family import Problem, Turn
from tugline.demo.live import Live
from tugline.demo.rig import rig
from tugline.demo.settings import DemoSettings
from tugline.demo.tasks import as_task
from tugline.inference.scripted import Reply, ScriptedEngine
from tugline.tokenizer import Tokenizer
from tugline.types import Call, Ids, Trajectory

END = "<|im_end|>"


def written(turn: Turn) -> str:
    """What the model samples to take this turn, in Qwen3's format."""
    if isinstance(turn, str):
        return turn + END
    call = f'{{"name": "{turn.name}", "arguments": {turn.arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>{END}"


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
        _, session, number = _parts(request_id)
        return Reply(tokenizer.encode(written(turns[session][number])))

    engine = ScriptedEngine(
        reply,
        vocab_size=tokenizer.size,
        max_model_len=settings.window,
        eos_ids=[tokenizer.encode(END)[0]],
    )
    async with rig(engine, tokenizer, folder, slots=settings.slots) as up:
        trajectories = await up.run(tasks, live.sessions)
        return trajectories, up.recorded([task.id for task in tasks])


def _parts(request_id: str) -> tuple[str, str, int]:
    """Kind, session and number of the call that the gateway named so."""
    kind, _, rest = request_id.partition("-")
    session, _, number = rest.rpartition("-")
    return kind, session, int(number)
