"""Supervised training of the demo's start policy, in three phases.

`LANGUAGE` teaches the meaning of issues, with solved short conversations without a system prompt.
`HARNESS_PROMPTS` teaches the same with a harness's system prompt and tools. `HABITS` adds failures
on purpose: recorded sessions in which the scripted agent mostly gives up, edits without reading, or
makes a wrong change. The result is a policy that makes well-formed calls and sometimes succeeds, as
reinforcement learning needs it.

Every function depends only on its arguments and a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from demo_tokenizer import END_OF_TURN, PAD, train_tokenizer
from msgspec.structs import replace
from scripted_turns import PLAIN, Tools, ToolTurn, Turn, write_script
from transformers import Qwen3Config, Qwen3ForCausalLM

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.demo.tasks import RepairProblem, generate
from tugline.trainers.grpo.batch import plain_sample
from tugline.trainers.sft import Sft, SftConfig
from tugline.types import Ids, Mask, Message, Role, Tool, Trace


@dataclass(frozen=True, slots=True)
class Phase:
    """Settings of a phase."""

    steps: int
    batch: int
    """Conversations per step."""
    matrix_lr: float
    """Learning rate of Muon, for the matrices inside the layers."""
    lr: float
    """Learning rate of AdamW, for embeddings, head and norms."""


LANGUAGE = Phase(steps=560, batch=48, matrix_lr=0.02, lr=3e-3)
"""Long enough for all families of bugs, which are learned one after another."""

HARNESS_PROMPTS = Phase(steps=90, batch=16, matrix_lr=0.01, lr=2e-3)
"""Short, because only the prompt around the known language is new."""

HABITS = Phase(steps=50, batch=16, matrix_lr=0.005, lr=1e-3)
"""Shorter still: more steps would fit the noise of single sessions."""

RECORDED = 240
"""Scripted sessions to record for the last phase."""

P_RIGHT = 0.33
"""Share of recorded sessions that solve their problem."""

WINDOW = 4096
"""Longest sequence, in tokens."""

WARMUP = 10
FINAL_LR = 0.05
"""Final share of the learning rate, which decreases linearly."""


class Opening(NamedTuple):
    """The first request of a harness for a problem."""

    prompts: tuple[str, ...]
    """The rendered prompt for this problem, and with blocks that for a second problem."""
    messages: tuple[Message, ...]
    schemas: tuple[Tool, ...]
    problem: RepairProblem


class Example(NamedTuple):
    """The ids of a conversation, and the mask of those that the policy samples; both ``(n,)``."""

    ids: Ids
    mask: Mask


def tiny_model(vocabulary: int, seed: int, window: int = WINDOW) -> Qwen3ForCausalLM:
    """Make a model with about 0.9 million random weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=window,
            initializer_range=0.05,  # 0.02, the default, suits wide models
            tie_word_embeddings=False,
            pad_token_id=PAD,
            eos_token_id=END_OF_TURN,
            bos_token_id=None,
        )
    )


# --------------------------------------------------------------------------- examples
def new_tokenizer(
    prompts: Sequence[str], phrases: Sequence[str], tools: Sequence[Tools], size: int
) -> Tokenizer:
    """Make a tokenizer for the tasks and for `prompts`, the rendered prompts of harnesses."""
    return Tokenizer(train_tokenizer(_corpus(prompts, tools), phrases, size), "tugline-demo")


def _corpus(prompts: Sequence[str], tools: Sequence[Tools]) -> Iterator[str]:
    rng = random.Random(0)
    for number, problem in enumerate(islice(generate("train", 0), 4000)):
        turns = write_script(problem, tools[number % len(tools)], rng, 0.6)
        yield f"user\n{problem.instruction}\n{problem.files[problem.module]}"
        yield from (turn_text(turn) for turn in turns)
        yield from (turn.result for turn in turns if isinstance(turn, ToolTurn))
    for _ in range(40):
        yield from prompts


def turn_text(turn: Turn) -> str:
    """Return the text that the policy samples for `turn`, without its special tokens."""
    if isinstance(turn, str):
        return turn
    return f'\n{{"name": "{turn.name}", "arguments": {turn.arguments}}}\n'


def encode_turn(turn: Turn, tokenizer: Tokenizer) -> Ids:
    """Return the ids that the policy samples for `turn`, with the end-of-turn id."""
    text = turn_text(turn) if isinstance(turn, str) else f"<tool_call>{turn_text(turn)}</tool_call>"
    return np.array(tokenizer.encode(f"{text}<|im_end|>"), np.int32)


def solved_conversations(
    rendering: Rendering, seed: int, tools: Tools, name: str | None = None
) -> Iterator[Example]:
    """Yield solved conversations without a harness's prompt; `name` is the system prompt."""
    rng = random.Random(seed)
    system = [Message(Role.SYSTEM, name)] if name else []
    for problem in generate("train", seed):
        script = write_script(problem, tools, rng)
        opening = [*system, Message(Role.USER, problem.instruction)]
        yield render_session(rendering, opening, (), script)


def prompted_conversations(
    rendering: Rendering, seed: int, tools: Tools, opening: Opening, *, move: bool
) -> Iterator[Example]:
    """Yield solved conversations with a harness's prompt; with `move`, with other paths."""
    rng = random.Random(seed)
    original = opening.problem
    for problem in generate("train", seed):
        script = write_script(problem, tools, rng)
        messages = [
            replace(
                one,
                content=one.content.replace(original.instruction, problem.instruction).replace(
                    original.module, problem.module
                ),
            )
            for one in opening.messages
        ]
        example = render_session(rendering, messages, opening.schemas, script)
        yield relocate(example, rendering.tokenizer, rng) if move else example


def plain_conversations(
    rendering: Rendering, seed: int, tools: Tools, p_right: float
) -> Iterator[Example]:
    """Yield conversations of agents without a prompt, whose tools have no descriptions."""
    rng = random.Random(seed)
    for problem in generate("train", seed):
        script = write_script(problem, tools, rng, p_right)
        opening = [Message(Role.USER, problem.instruction)]
        yield render_session(rendering, opening, PLAIN, script)


def render_session(
    rendering: Rendering, opening: Sequence[Message], schemas: Sequence[Tool], turns: Sequence[Turn]
) -> Example:
    """Render a scripted session as the gateway does, without running the harness."""
    prompt = rendering.render(opening, schemas)
    mask = [np.zeros(len(prompt), np.bool_)]
    for number, turn in enumerate(turns):
        answer = encode_turn(turn, rendering.tokenizer)
        mask.append(np.ones(len(answer), np.bool_))
        if isinstance(turn, str):
            return Example(np.concatenate((prompt, answer)), np.concatenate(mask))
        result = Message(Role.TOOL, turn.result, tool_call_id=f"call_{number}")
        more = rendering.render_extension(prompt, answer, [result], schemas)
        if more is None:
            break
        mask.append(np.zeros(len(more), np.bool_))
        prompt = np.concatenate((prompt, answer, more))
    raise ValueError("the last turn of a script must be a text")


def recorded_sessions(
    traces: Sequence[Trace], tokenizer: Tokenizer, seed: int, *, move: bool
) -> Iterator[Example]:
    """Yield recorded sessions repeatedly; with `move`, each time with other paths."""
    rng = random.Random(seed)
    while True:
        for trace in rng.sample(traces, len(traces)):
            example = Example(trace.ids, trace.mask)
            yield relocate(example, tokenizer, rng) if move else example


# --------------------------------------------------------------------------- paths
_DOCS = re.compile(r"(/\S+?)(?=/node_modules/)")
_CWD = re.compile(r"(?<=<cwd>\n)\S+")
_ROOTS = (
    "home", "tmp", "root", "work", "srv", "Users", "opt", "data", "var", "usr", "lib", "cache",
    ".cache", "share", "projects", "code",
)  # fmt: skip


def relocate(example: Example, tokenizer: Tokenizer, rng: random.Random) -> Example:
    """Replace the paths of a session, so that a policy does not depend on those of the recording.

    Only ids before the first answer change: they are decoded, given random paths of an installation
    and a session, and encoded again.
    """
    start = int(np.argmax(example.mask))
    text = tokenizer.decode(example.ids[:start].tolist())
    installation, session = _make_path(rng), _make_path(rng)
    number = f"{rng.getrandbits(64):016x}"[: rng.choice((8, 12, 16))]
    run = f"{rng.randrange(10**8):08d}-{rng.randrange(10**6):06d}"
    text = _DOCS.sub(lambda _: installation, text)
    text = _CWD.sub(lambda _: f"{session}/runs/demo-{run}/sessions/{number}/work", text)
    head = np.array(tokenizer.encode(text), np.int32)
    return Example(
        np.concatenate((head, example.ids[start:])),
        np.concatenate((np.zeros(len(head), np.bool_), example.mask[start:])),
    )


def _make_path(rng: random.Random) -> str:
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
    return "/" + "/".join(rng.choices((*_ROOTS, word), k=rng.randint(1, 4)))


# --------------------------------------------------------------------------- learning
class _MuonAndAdamW:
    """An optimizer that uses Muon for the matrices in the layers, and AdamW for all else."""

    def __init__(self, model: Qwen3ForCausalLM, phase: Phase) -> None:
        matrices = [p for name, p in model.model.named_parameters() if _is_matrix(name, p)]
        inside = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in inside]
        self._optimizers = (
            torch.optim.Muon(matrices, lr=phase.matrix_lr, weight_decay=0.05),
            torch.optim.AdamW(rest, lr=phase.lr, betas=(0.9, 0.95), weight_decay=0.05),
        )
        self.param_groups = [group for one in self._optimizers for group in one.param_groups]
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    def step(self) -> None:
        """Update all parameters."""
        for one in self._optimizers:
            one.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Reset all gradients."""
        for one in self._optimizers:
            one.zero_grad(set_to_none=set_to_none)


class _PhaseTrainer(Sft):
    """Trainer of a phase; its learning rates also decrease during the warm-up."""

    def __init__(self, model: Qwen3ForCausalLM, phase: Phase) -> None:
        super().__init__(model, SftConfig(tree_packing=False))
        self.optimizer = _MuonAndAdamW(model, phase)
        self._steps = phase.steps

    @property
    def learning_rate_share(self) -> float:
        """Factor of the learning rates for the next step."""
        return min(1.0, (self.updates + 1) / WARMUP) * (
            1 - (1 - FINAL_LR) * self.updates / self._steps
        )


def learn(model: Qwen3ForCausalLM, examples: Iterator[Example], phase: Phase) -> Iterator[float]:
    """Train `model` in place; yield the loss of each step, in nats per sampled id."""
    trainer = _PhaseTrainer(model, phase)
    for step in range(phase.steps):
        batch = islice(examples, phase.batch)
        done = trainer.update([plain_sample(one.ids, one.mask) for one in batch])
        if done.culprits:
            msg = f"the loss of step {step} is not finite; lower the phase's learning rates"
            raise FloatingPointError(msg)
        yield done.sums["loss"]


def _is_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim > 1 and "embed" not in name
