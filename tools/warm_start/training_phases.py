"""Supervised training of the demo's start policy, in three phases.

`LANGUAGE` teaches what issues mean: short conversations without a system prompt, mostly solved.
`HARNESS_PROMPTS` teaches the same within a harness's own system prompt and tools. `HABITS` then
adds failures on purpose: recorded sessions in which the scripted agent mostly gives up, edits
blindly or is wrong. The result is a policy that makes well-formed calls and sometimes succeeds,
which is what reinforcement learning needs to start from.

Everything is a function of its arguments and a seed.
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
from scripted_turns import Tools, ToolTurn, Turn, write_script
from transformers import Qwen3Config, Qwen3ForCausalLM

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.demo.tasks import RepairProblem, generate
from tugline.trainers.grpo.batch import plain_sample
from tugline.trainers.sft import Sft, SftConfig
from tugline.types import Ids, Mask, Message, Role, Tool, Trace


@dataclass(frozen=True, slots=True)
class Phase:
    """One round of supervised training."""

    steps: int
    batch: int
    """Conversations in one step."""
    matrix_lr: float
    """Learning rate of Muon, for the matrices inside the layers."""
    lr: float
    """Learning rate of AdamW, for embeddings, head and norms."""


LANGUAGE = Phase(steps=560, batch=48, matrix_lr=0.02, lr=3e-3)
"""Long enough for every family of bugs: they are learned one after the other."""

HARNESS_PROMPTS = Phase(steps=90, batch=16, matrix_lr=0.01, lr=2e-3)
"""Short: only the prompt around the known language is new."""

HABITS = Phase(steps=50, batch=16, matrix_lr=0.005, lr=1e-3)
"""Shorter still: more would fit the noise of single sessions."""

RECORDED = 240
"""Scripted sessions to record for the last phase."""

P_RIGHT = 0.33
"""Share of recorded sessions that solve their problem."""

WINDOW = 4096
"""Longest sequence, in tokens."""

WARMUP = 10
FINAL_LR = 0.05
"""The learning rate falls linearly to this share."""


class Opening(NamedTuple):
    """What a harness sends of a problem before its agent has done anything."""

    prompts: tuple[str, ...]
    """All of it as it is rendered, for this problem and perhaps for another one."""
    messages: tuple[Message, ...]
    schemas: tuple[Tool, ...]
    problem: RepairProblem


class Example(NamedTuple):
    """A conversation and which of its ids are the policy's; both of shape ``(n,)``."""

    ids: Ids
    mask: Mask


def tiny_model(vocabulary: int, seed: int, window: int = WINDOW) -> Qwen3ForCausalLM:
    """A model with fresh random weights of about 0.9 million parameters."""
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
    """A tokenizer for the task family and for `prompts`, the harness's text as it is rendered."""
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
    """The text that the policy samples for `turn`, without the special tokens around it."""
    if isinstance(turn, str):
        return turn
    return f'\n{{"name": "{turn.name}", "arguments": {turn.arguments}}}\n'


def encode_turn(turn: Turn, tokenizer: Tokenizer) -> Ids:
    """The ids that the policy samples for `turn`, its end included."""
    text = turn_text(turn) if isinstance(turn, str) else f"<tool_call>{turn_text(turn)}</tool_call>"
    return np.array(tokenizer.encode(f"{text}<|im_end|>"), np.int32)


def solved_conversations(
    rendering: Rendering, seed: int, tools: Tools, name: str | None = None
) -> Iterator[Example]:
    """Endless solved conversations without a harness's own prompt; `name` stands for it."""
    rng = random.Random(seed)
    system = [Message(Role.SYSTEM, name)] if name else []
    for problem in generate("train", seed):
        script = write_script(problem, tools, rng)
        opening = [*system, Message(Role.USER, problem.instruction)]
        yield render_session(rendering, opening, (), script)


def prompted_conversations(
    rendering: Rendering, seed: int, tools: Tools, opening: Opening, *, move: bool
) -> Iterator[Example]:
    """Endless solved conversations with a harness's own prompt, moved to other folders or not."""
    rng = random.Random(seed)
    then = opening.problem
    for problem in generate("train", seed):
        script = write_script(problem, tools, rng)
        messages = [
            replace(
                one,
                content=one.content.replace(then.instruction, problem.instruction).replace(
                    then.module, problem.module
                ),
            )
            for one in opening.messages
        ]
        example = render_session(rendering, messages, opening.schemas, script)
        yield relocate(example, rendering.tokenizer, rng) if move else example


def render_session(
    rendering: Rendering, opening: Sequence[Message], schemas: Sequence[Tool], turns: Sequence[Turn]
) -> Example:
    """A scripted session as the gateway renders it, without running the harness."""
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
    raise ValueError("a script must end with a text")


def recorded_sessions(
    traces: Sequence[Trace], tokenizer: Tokenizer, seed: int, *, move: bool
) -> Iterator[Example]:
    """Recorded sessions, again and again, where `move` in ever other folders."""
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
    """The same session in other directories: a policy must not depend on where it was recorded.

    Only ids before the first answer change: they are decoded, given the paths of an imaginary
    installation and session, and encoded again.
    """
    start = int(np.argmax(example.mask))
    text = tokenizer.decode(example.ids[:start].tolist())
    installation, session = _place(rng), _place(rng)
    number = f"{rng.getrandbits(64):016x}"[: rng.choice((8, 12, 16))]
    run = f"{rng.randrange(10**8):08d}-{rng.randrange(10**6):06d}"
    text = _DOCS.sub(lambda _: installation, text)
    text = _CWD.sub(lambda _: f"{session}/runs/demo-{run}/sessions/{number}/work", text)
    head = np.array(tokenizer.encode(text), np.int32)
    return Example(
        np.concatenate((head, example.ids[start:])),
        np.concatenate((np.zeros(len(head), np.bool_), example.mask[start:])),
    )


def _place(rng: random.Random) -> str:
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
    return "/" + "/".join(rng.choices((*_ROOTS, word), k=rng.randint(1, 4)))


# --------------------------------------------------------------------------- learning
class _MuonAndAdamW:
    """Muon for the matrices inside the layers, AdamW for the rest, as one optimizer."""

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
        """Forget the gradient."""
        for one in self._optimizers:
            one.zero_grad(set_to_none=set_to_none)


class _PhaseTrainer(Sft):
    """One phase; its learning rates fall from the first step on, also during the warm-up."""

    def __init__(self, model: Qwen3ForCausalLM, phase: Phase) -> None:
        super().__init__(model, SftConfig(tree_packing=False))
        self.optimizer = _MuonAndAdamW(model, phase)
        self._steps = phase.steps

    @property
    def learning_rate_share(self) -> float:
        """Share of the highest learning rates that the next step has."""
        return min(1.0, (self.updates + 1) / WARMUP) * (
            1 - (1 - FINAL_LR) * self.updates / self._steps
        )


def learn(model: Qwen3ForCausalLM, examples: Iterator[Example], phase: Phase) -> Iterator[float]:
    """Train `model` in place; yields each step's loss in nats per id that the policy says."""
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
