"""Make the policy that the demo starts from: ``python tools/warm_start/rebuild.py [OUT]``.

One scripted session per harness records its prompt, the tokenizer is made from that, short
conversations teach the language of the tasks, and scripted sessions recorded through the gateway
with the real harness teach the rest. Seeded throughout; between machines only the last digit of a
float may differ.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import training_phases as phases
from demo_tokenizer import END_OF_TURN, harness_phrases, train_tokenizer
from scripted_turns import NOT_FOUND, Turn, write_script
from session_rig import ProgressLines, make_task, rendering, rig
from transformers import Qwen3ForCausalLM

from tugline.chat.tokenizer import Tokenizer
from tugline.demo.run import WARM_START, DemoSettings
from tugline.demo.tasks import RepairProblem, generate
from tugline.testing.scripted_engine import Reply, ScriptedEngine
from tugline.types import Call, Ids, Role, Tool, Trace, Trajectory

SEED = 0
AGENT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "openai_loop.py"
BYTES_WINDOW = 65_536
"""Window for a prompt of which every byte is a token."""
THREADS = 1
REPORT_EVERY = 25
"""Steps between two lines about the loss."""
HARNESSES = {
    "pi": (DemoSettings(), 1.0),
    "shell": (DemoSettings(harness="shell", command=f"python3 {AGENT}"), 0.25),
}
"""Recorded harnesses, and their number of sessions relative to pi's."""
PHASES = (phases.LANGUAGE, phases.HARNESS_PROMPTS, phases.HABITS)


class Plan(NamedTuple):
    """How much is recorded and trained; tests take less of everything."""

    harnesses: dict[str, tuple[DemoSettings, float]]
    sessions: int
    phases: Sequence[phases.Phase]


class Opening(NamedTuple):
    """What a harness sends before its agent has done anything."""

    prompt: str
    """All of it, as it is rendered."""
    system: str
    tools: tuple[Tool, ...]


def main() -> None:
    """Make the model and save it, by default where the package keeps it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=WARM_START)
    parser.add_argument(
        "--harness",
        choices=HARNESSES,
        action="append",
        help="record only this one; may be repeated",
    )
    parser.add_argument(
        "--sessions", type=int, default=phases.RECORDED, help="scripted sessions to record of pi"
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        default=[phase.steps for phase in PHASES],
        help="steps of the three phases: language, prompts, habits",
    )
    options = parser.parse_args()
    plan = Plan(
        {name: HARNESSES[name] for name in options.harness or HARNESSES},
        options.sessions,
        [replace(phase, steps=n) for phase, n in zip(PHASES, options.steps, strict=True)],
    )
    with tempfile.TemporaryDirectory(prefix="tugline-") as scratch:
        make_policy(plan, Path(scratch), options.out, ProgressLines())


def make_policy(plan: Plan, scratch: Path, folder: Path, live: ProgressLines) -> None:
    """Make tokenizer and model in `folder`; `scratch` takes the recorded sessions."""
    torch.set_num_threads(THREADS)
    live.phase("recording the prompts of the harnesses")
    language, harness_prompts, habits = plan.phases
    tokenizer, openings = record_openings(plan, scratch / "openings", live)
    template = rendering(tokenizer)
    model = phases.tiny_model(tokenizer.size, SEED)
    live.phase("teaching the language of the tasks")
    teach(model, phases.solved_conversations(template, SEED + 1), language, live)
    live.phase("teaching the prompts of the harnesses")
    prompts = {
        name: phases.solved_conversations(template, SEED + 2, one.system, one.tools)
        for name, one in openings.items()
    }
    teach(model, mix_by_share(plan, prompts), harness_prompts, live)
    traces = {
        name: record_traces(plan, name, tokenizer, scratch / name, live) for name in plan.harnesses
    }
    live.phase("teaching habits, good and bad")
    sessions = {
        name: phases.relocated_sessions(recorded, tokenizer, SEED)
        for name, recorded in traces.items()
    }
    teach(model, mix_by_share(plan, sessions), habits, live)
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    tokenizer.save(folder)
    live.phase(f"saved in {folder}")


def record_openings(
    plan: Plan, scratch: Path, live: ProgressLines
) -> tuple[Tokenizer, dict[str, Opening]]:
    """Record what every harness sends first, and make a tokenizer for it."""
    bytes_only = Tokenizer(train_tokenizer([], []), "bytes")
    openings: dict[str, Opening] = {}
    problem = next(generate("train", SEED))
    for name, (settings, _) in plan.harnesses.items():
        script: list[tuple[RepairProblem, Sequence[Turn]]] = [(problem, [NOT_FOUND])]
        (scratch / name).mkdir(parents=True)
        roomy = msgspec.structs.replace(settings, window=BYTES_WINDOW)
        _, calls = asyncio.run(record(script, bytes_only, scratch / name, roomy, live))
        (call,) = next(iter(calls.values()))
        prompt = bytes_only.decode(call.prompt_ids.tolist())
        system = "\n".join(one.content for one in call.messages if one.role is Role.SYSTEM)
        openings[name] = Opening(prompt, system, call.tools)
    texts = {text for one in openings.values() for text in harness_phrases(one.system, one.tools)}
    prompts = [one.prompt for one in openings.values()]
    return phases.new_tokenizer(prompts, sorted(texts)), openings


def record_traces(
    plan: Plan, name: str, tokenizer: Tokenizer, scratch: Path, live: ProgressLines
) -> list[Trace]:
    """Record scripted sessions of one harness, and build their traces."""
    settings, share = plan.harnesses[name]
    live.phase(f"recording scripted sessions of {name}")
    scratch.mkdir(parents=True)
    rng = random.Random(f"{SEED}/{name}")
    problems = islice(generate("train", SEED + 3), math.ceil(share * plan.sessions))
    scripts = [(problem, write_script(problem, rng, phases.P_RIGHT)) for problem in problems]
    trajectories, _ = asyncio.run(record(scripts, tokenizer, scratch, settings, live))
    return [trace for one in trajectories for trace in one.traces]


async def record(
    scripts: Sequence[tuple[RepairProblem, Sequence[Turn]]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: DemoSettings,
    live: ProgressLines,
) -> tuple[list[Trajectory], dict[str, tuple[Call, ...]]]:
    """Play each script in a session of its own; returns trajectories and recorded calls.

    The script takes the policy's place (a `ScriptedEngine`) and the real harness executes it, so
    the recordings have the harness's own system prompt, tool schemas and tool results.
    """
    tasks = [
        make_task(settings, f"script-{i:04d}", problem, samples=1)
        for i, (problem, _) in enumerate(scripts)
    ]
    turns = {f"{task.id}-0": script for task, (_, script) in zip(tasks, scripts, strict=True)}

    def reply(_prompt: Ids, request_id: str) -> Reply:
        # The gateway names a request <kind>-<session>-<number of the call>.
        session, _, number = request_id.partition("-")[2].rpartition("-")
        script = turns.get(session)
        turn = script[int(number)] if script is not None else NOT_FOUND  # a probe has no session
        return Reply(phases.encode_turn(turn, tokenizer).tolist())

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=settings.window, eos_ids=[END_OF_TURN]
    )
    async with rig(engine, tokenizer, folder, slots=settings.slots) as up:
        trajectories = await up.run(tasks, live.sessions)
        return trajectories, await up.recorded([task.id for task in tasks])


def mix_by_share(
    plan: Plan, examples: dict[str, Iterator[phases.Example]]
) -> Iterator[phases.Example]:
    """Examples of every harness, in proportion to its share."""
    rng = random.Random(SEED)
    weights = [plan.harnesses[name][1] for name in examples]
    while True:
        (name,) = rng.choices(list(examples), weights)
        yield next(examples[name])


def teach(
    model: Qwen3ForCausalLM,
    examples: Iterator[phases.Example],
    phase: phases.Phase,
    live: ProgressLines,
) -> None:
    """Train one phase, with a line about the loss now and then."""
    for step, loss in enumerate(phases.learn(model, examples, phase), start=1):
        if step % REPORT_EVERY == 0 or step == phase.steps:
            live.phase(f"  step {step} of {phase.steps}: {loss:.3f} nats a token")


if __name__ == "__main__":
    main()
