"""``tugline demo --rebuild-warm-start``: make the policy that the demo starts from.

From nothing but the package: one scripted session per harness shows what that harness says, the
tokenizer is made from it, the language of the tasks is taught on short conversations, and whole
scripted sessions, recorded through the gateway with the real harness, teach the rest. Seeded
throughout; what may differ between machines is the last digit of a float.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from rich.console import Console
from transformers import Qwen3ForCausalLM

from tugline.chat.tokenizer import Tokenizer
from tugline.demo import warm_start as ws
from tugline.demo.family import NOT_FOUND, Problem, Turn, generate
from tugline.demo.live import Live
from tugline.demo.model import tiny_model
from tugline.demo.policy import WARM_START
from tugline.demo.record import record
from tugline.demo.rig import rendering
from tugline.demo.settings import DemoSettings
from tugline.demo.tokenizer import harness_phrases, train_tokenizer
from tugline.errors import UsageError
from tugline.types import Role, Tool, Trace

SEED = 0
EXAMPLE = Path("examples/agents/openai_loop.py")
BYTES_WINDOW = 65_536
"""Room for a prompt of which every byte is a token."""
THREADS = 1
EVERY = 25
"""Steps between two lines about the loss."""
HARNESSES = {
    "pi": (DemoSettings(), 1.0),
    "shell": (DemoSettings(harness="shell", command=f"python3 {EXAMPLE}"), 0.25),
}
"""Who is recorded, and how many sessions for each one of pi's."""


class Heard(NamedTuple):
    """The opening of a harness."""

    prompt: str
    """All of it, as it is rendered."""
    system: str
    tools: tuple[Tool, ...]


def rebuild(out: Path | None = None) -> Path:
    """Make the warm start and put it in `out` (default: where the package keeps it)."""
    if not EXAMPLE.exists():
        msg = f"{EXAMPLE} is not here; start this from a checkout of the repository"
        raise UsageError(msg)
    folder = out or WARM_START
    with tempfile.TemporaryDirectory(prefix="tugline-") as scratch, Live(1, _console()) as live:
        _make(Path(scratch), folder, live)
    return folder


def _make(scratch: Path, folder: Path, live: Live) -> None:
    torch.set_num_threads(THREADS)
    live.phase("listening to what the harnesses say")
    tokenizer, heard = _listen(scratch / "listen", live)
    template = rendering(tokenizer)
    model = tiny_model(tokenizer.size, SEED)
    live.phase("teaching the language of the tasks")
    _teach(model, ws.rendered(template, SEED + 1), ws.LANGUAGE, live)
    live.phase("teaching the prompts of the harnesses")
    prompts = {
        name: ws.rendered(template, SEED + 2, one.system, one.tools) for name, one in heard.items()
    }
    _teach(model, _by_share(prompts), ws.SURROUNDINGS, live)
    traces = {name: _recorded(name, tokenizer, scratch / name, live) for name in HARNESSES}
    live.phase("teaching their ways, good and bad")
    sessions = {name: ws.recorded(known, tokenizer, SEED) for name, known in traces.items()}
    _teach(model, _by_share(sessions), ws.HABITS, live)
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save(folder)
    live.phase(f"saved in {folder}")


def _listen(scratch: Path, live: Live) -> tuple[Tokenizer, dict[str, Heard]]:
    """What every harness says before its agent has done anything, and a tokenizer for that."""
    bytes_only = Tokenizer(train_tokenizer([], []), "bytes")
    heard: dict[str, Heard] = {}
    problem = next(generate("train", SEED))
    for name, (settings, _) in HARNESSES.items():
        script: list[tuple[Problem, Sequence[Turn]]] = [(problem, [NOT_FOUND])]
        roomy = replace(settings, window=BYTES_WINDOW)
        _, calls = asyncio.run(record(script, bytes_only, scratch / name, roomy, live))
        (call,) = next(iter(calls.values()))
        prompt = bytes_only.decode(call.prompt_ids.tolist())
        system = "\n".join(one.content for one in call.messages if one.role is Role.SYSTEM)
        heard[name] = Heard(prompt, system, call.tools)
    phrases = {text for one in heard.values() for text in harness_phrases(one.system, one.tools)}
    return ws.new_tokenizer([one.prompt for one in heard.values()], sorted(phrases)), heard


def _recorded(name: str, tokenizer: Tokenizer, scratch: Path, live: Live) -> list[Trace]:
    """Traces of scripted sessions of one harness."""
    settings, share = HARNESSES[name]
    live.phase(f"recording scripted sessions of {name}")
    rng = random.Random(f"{SEED}/{name}")
    problems = islice(generate("train", SEED + 3), int(share * ws.RECORDED))
    scripts = [(problem, problem.script(rng, ws.P_RIGHT)) for problem in problems]
    trajectories, _ = asyncio.run(record(scripts, tokenizer, scratch, settings, live))
    return [trace for one in trajectories for trace in one.traces]


def _by_share(examples: dict[str, Iterator[ws.Example]]) -> Iterator[ws.Example]:
    """Examples of every harness, as often as its share says."""
    rng = random.Random(SEED)
    weights = [HARNESSES[name][1] for name in examples]
    while True:
        (name,) = rng.choices(list(examples), weights)
        yield next(examples[name])


def _teach(
    model: Qwen3ForCausalLM, examples: Iterator[ws.Example], phase: ws.Phase, live: Live
) -> None:
    for step, loss in enumerate(ws.learn(model, examples, phase), start=1):
        if step % EVERY == 0 or step == phase.steps:
            live.phase(f"  step {step} of {phase.steps}: {loss:.3f} nats a token")


def _console() -> Console:
    return Console(stderr=True, highlight=False)
