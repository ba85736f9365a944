"""Make the demo's start policy: ``python tools/warm_start/rebuild.py [OUT]``.

First, scripted sessions record the prompt of each harness, from which the tokenizer is made. Then
the model is trained on short conversations about the tasks, and on scripted sessions that are
recorded through the gateway with the real harness. Everything is seeded; between machines only the
last digit of a float may differ.

With ``--blocks`` it makes a policy for four harnesses, whose prompts have a few hundred tokens
each: the start policy of ``tugline bench learn``.
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
import scripted_turns as scripts
import torch
import training_phases as phases
from demo_tokenizer import END_OF_TURN, common_blocks, harness_phrases, train_tokenizer
from scripted_turns import NOT_FOUND, Tools, Turn, write_script
from session_rig import ProgressLines, make_task, rendering, rig
from transformers import Qwen3ForCausalLM

from tugline.chat.tokenizer import Tokenizer
from tugline.demo.run import WARM_START, DemoSettings
from tugline.demo.tasks import RepairProblem, generate
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Call, Ids, Role, Trace, Trajectory

SEED = 0
AGENT = Path(__file__).resolve().parents[2] / "examples" / "agents" / "openai_loop.py"
BYTES_WINDOW = 262_144
"""Context window for prompts in which every byte is a token."""
VOCABULARY = 1400
"""Ids of the tokenizer, not counting those of whole prompt blocks."""
THREADS = 1
REPORT_EVERY = 25
"""Steps between two printed losses."""


class RecordedHarness(NamedTuple):
    """A harness whose sessions are recorded."""

    settings: DemoSettings
    tools: Tools
    share: float = 1.0
    """Its number of sessions, relative to that of the other harnesses."""


HARNESSES = {
    "pi": RecordedHarness(DemoSettings(), scripts.PI),
    "shell": RecordedHarness(
        DemoSettings(harness="shell", command=f"python3 {AGENT}"), scripts.PI, 0.25
    ),
}
"""Harnesses of the demo."""
PLAIN = "an agent of one's own"
"""Conversations of agents that are not recorded: without a prompt, with undescribed tools."""
PLAIN_SHARE = 0.25
BLOCKS_WINDOW = 32_768
"""Large enough that the gateway does not estimate the length of a prompt before tokenizing it: the
estimate assumes tokens shorter than a block, and would refuse these prompts."""
MANY = {
    name: RecordedHarness(DemoSettings(harness=name, window=BLOCKS_WINDOW), tools)
    for name, tools in {
        "codex": scripts.CODEX,
        "claude_code": scripts.CLAUDE_CODE,
        "qwen_code": scripts.QWEN_CODE,
        "pi": scripts.PI,
    }.items()
}
"""Harnesses of ``--blocks``."""
PHASES = (phases.LANGUAGE, phases.HARNESS_PROMPTS, phases.HABITS)


class BuildPlan(NamedTuple):
    """Which sessions to record, and how long to train; tests use small numbers."""

    harnesses: dict[str, RecordedHarness]
    sessions: int
    phases: Sequence[phases.Phase]
    blocks: bool

    @property
    def runtime(self) -> str:
        """The sandbox; with blocks, one that has the same paths in each session."""
        return "bubblewrap" if self.blocks else "local"


def main() -> None:
    """Make the model and save it, by default in the package."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=WARM_START)
    parser.add_argument(
        "--harness",
        choices=sorted(HARNESSES | MANY),
        action="append",
        help="record only this harness; may be repeated",
    )
    parser.add_argument(
        "--sessions",
        type=int,
        default=phases.RECORDED,
        help="number of scripted sessions to record with pi",
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        default=[phase.steps for phase in PHASES],
        help="steps of the three phases: language, prompts, habits",
    )
    parser.add_argument(
        "--blocks", action="store_true", help="four harnesses, with few tokens for their prompts"
    )
    options = parser.parse_args()
    known = MANY if options.blocks else HARNESSES
    if unknown := set(options.harness or ()) - set(known):
        parser.error(f"--harness {' '.join(unknown)}: must be one of {', '.join(known)}")
    plan = BuildPlan(
        {name: known[name] for name in options.harness or known},
        options.sessions,
        [replace(phase, steps=n) for phase, n in zip(PHASES, options.steps, strict=True)],
        options.blocks,
    )
    with tempfile.TemporaryDirectory(prefix="tugline-") as scratch:
        make_policy(plan, Path(scratch), options.out, ProgressLines())


def make_policy(plan: BuildPlan, scratch: Path, folder: Path, live: ProgressLines) -> None:
    """Make tokenizer and model in `folder`; recorded sessions go to `scratch`."""
    torch.set_num_threads(THREADS)
    live.phase("recording the prompts of the harnesses")
    language, harness_prompts, habits = plan.phases
    tokenizer, openings = record_openings(plan, scratch / "openings", live)
    template = rendering(tokenizer)
    window = BLOCKS_WINDOW if plan.blocks else phases.WINDOW
    model = phases.tiny_model(tokenizer.size, SEED, window)
    live.phase("teaching the language of the tasks")
    kinds = {one.tools: name for name, one in reversed(plan.harnesses.items())}
    conversations = {
        name: phases.solved_conversations(
            template, SEED + 1, tools, name if len(kinds) > 1 else None
        )
        for tools, name in kinds.items()
    }
    teach(model, mix_by_share(plan, conversations), language, live)
    live.phase("teaching the prompts of the harnesses")
    prompts = {
        name: phases.prompted_conversations(
            template, SEED + 2, plan.harnesses[name].tools, opening, move=not plan.blocks
        )
        for name, opening in openings.items()
    }
    if not plan.blocks:
        prompts[PLAIN] = phases.plain_conversations(template, SEED + 2, scripts.PI, 1.0)
    teach(model, mix_by_share(plan, prompts), harness_prompts, live)
    traces = {
        name: record_traces(plan, name, tokenizer, scratch / name, live) for name in plan.harnesses
    }
    live.phase("teaching habits, good and bad")
    sessions = {
        name: phases.recorded_sessions(recorded, tokenizer, SEED, move=not plan.blocks)
        for name, recorded in traces.items()
    }
    if not plan.blocks:
        sessions[PLAIN] = phases.plain_conversations(template, SEED + 4, scripts.PI, phases.P_RIGHT)
    teach(model, mix_by_share(plan, sessions), habits, live)
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    tokenizer.save(folder)
    live.phase(f"saved in {folder}")


def record_openings(
    plan: BuildPlan, scratch: Path, live: ProgressLines
) -> tuple[Tokenizer, dict[str, phases.Opening]]:
    """Record the first request of every harness, and make a tokenizer for the prompts."""
    bytes_only = Tokenizer(train_tokenizer([], []), "bytes")
    openings: dict[str, phases.Opening] = {}
    # Two successive problems differ in everything that does not come from the harness.
    problems = list(islice(generate("train", SEED), 2 if plan.blocks else 1))
    for name, harness in plan.harnesses.items():
        script: list[tuple[RepairProblem, Sequence[Turn]]] = [
            (problem, [NOT_FOUND]) for problem in problems
        ]
        (scratch / name).mkdir(parents=True)
        large_window = harness._replace(
            settings=msgspec.structs.replace(harness.settings, window=BYTES_WINDOW)
        )
        _, calls = asyncio.run(
            record(script, bytes_only, scratch / name, large_window, plan.runtime, live)
        )
        first = [calls[session][0] for session in sorted(calls)]
        prompts = tuple(bytes_only.decode(call.prompt_ids.tolist()) for call in first)
        openings[name] = phases.Opening(prompts, first[0].messages, first[0].tools, problems[0])
    if plan.blocks:
        texts = {text for one in openings.values() for text in common_blocks(*one.prompts)}
    else:
        texts = {text for one in openings.values() for text in _phrases(one)}
    prompts = [one.prompts[0] for one in openings.values()]
    size = VOCABULARY + (len(texts) if plan.blocks else 0)
    tools = list(dict.fromkeys(one.tools for one in plan.harnesses.values()))
    tokenizer = phases.new_tokenizer(prompts, sorted(texts), tools, size)
    for name, one in openings.items():
        ids = len(tokenizer.encode(one.prompts[0]))
        live.phase(f"  {name}: a prompt of {len(one.prompts[0]):,} characters is {ids:,} tokens")
    return tokenizer, openings


def _phrases(opening: phases.Opening) -> list[str]:
    system = "\n".join(one.content for one in opening.messages if one.role is Role.SYSTEM)
    return harness_phrases(system, opening.schemas)


def record_traces(
    plan: BuildPlan, name: str, tokenizer: Tokenizer, scratch: Path, live: ProgressLines
) -> list[Trace]:
    """Record scripted sessions of a harness, and build their traces."""
    harness = plan.harnesses[name]
    live.phase(f"recording scripted sessions of {name}")
    scratch.mkdir(parents=True)
    rng = random.Random(f"{SEED}/{name}")
    problems = islice(generate("train", SEED + 3), math.ceil(harness.share * plan.sessions))
    script = [
        (problem, write_script(problem, harness.tools, rng, phases.P_RIGHT)) for problem in problems
    ]
    trajectories, _ = asyncio.run(record(script, tokenizer, scratch, harness, plan.runtime, live))
    return [trace for one in trajectories for trace in one.traces]


async def record(
    script: Sequence[tuple[RepairProblem, Sequence[Turn]]],
    tokenizer: Tokenizer,
    folder: Path,
    harness: RecordedHarness,
    runtime: str,
    live: ProgressLines,
) -> tuple[list[Trajectory], dict[str, tuple[Call, ...]]]:
    """Play each script in its own session; return trajectories and recorded calls.

    A `ScriptedEngine` samples the script in place of the policy, and the real harness executes it.
    So the recordings have the system prompt, tool schemas and tool results of the harness.
    """
    settings = harness.settings
    tasks = [
        make_task(settings, f"script-{i:04d}", problem, runtime)
        for i, (problem, _) in enumerate(script)
    ]
    turns = {f"{task.id}-0": answers for task, (_, answers) in zip(tasks, script, strict=True)}

    def reply(_prompt: Ids, request_id: str) -> Reply:
        # The gateway names a request <kind>-<session>-<number of the call>.
        session, _, number = request_id.partition("-")[2].rpartition("-")
        answers = turns.get(session)
        turn = NOT_FOUND if answers is None else answers[int(number)]  # a probe has no session
        return Reply(phases.encode_turn(turn, tokenizer).tolist())

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=settings.window, eos_ids=[END_OF_TURN]
    )
    async with rig(engine, tokenizer, folder, slots=settings.slots) as up:
        trajectories = await up.run(tasks, live.sessions)
        return trajectories, await up.recorded([task.id for task in tasks])


def mix_by_share(
    plan: BuildPlan, examples: dict[str, Iterator[phases.Example]]
) -> Iterator[phases.Example]:
    """Yield examples of all harnesses at random, weighted by their shares."""
    rng = random.Random(SEED)
    weights = [PLAIN_SHARE if name == PLAIN else plan.harnesses[name].share for name in examples]
    while True:
        (name,) = rng.choices(list(examples), weights)
        yield next(examples[name])


def teach(
    model: Qwen3ForCausalLM,
    examples: Iterator[phases.Example],
    phase: phases.Phase,
    live: ProgressLines,
) -> None:
    """Train one phase, and print the loss every `REPORT_EVERY` steps."""
    for step, loss in enumerate(phases.learn(model, examples, phase), start=1):
        if step % REPORT_EVERY == 0 or step == phase.steps:
            live.phase(f"  step {step} of {phase.steps}: {loss:.3f} nats a token")


if __name__ == "__main__":
    main()
