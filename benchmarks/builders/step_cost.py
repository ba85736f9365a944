"""Training cost with each builder: optimizer updates, tokens and time of one step.

Groups of synthetic sessions go through the real builders and the real trainer, with a tiny model on
one CPU thread, or on a GPU in bfloat16 with any model. Updates are batched as published (a fixed
number of traces, as in the reference's trainer) and as Tugline does it (a fixed number of sessions
with all of their traces).
"""

# ruff: noqa: INP001 - a program, not a package
from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tugline.plugins import find
from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.tokens import token_weights
from tugline.trainers.grpo.train import Grpo
from tugline.types import (
    Branch,
    Call,
    Finish,
    Ids,
    Reward,
    Sampling,
    Status,
    Timings,
    TraceKind,
    Trajectory,
    VersionSpan,
)

VOCABULARY = 1400
SESSIONS = 4
SESSIONS_PER_UPDATE = 2
TURNS = 50
BASE, SAMPLED, ADDED = 8000, 300, 1550
"""Tokens of system prompt and tools, of an answer, and of the tool result that follows it."""
GPU_TOKENS = 131_072
"""Maximum tokens of a forward pass with ``--model``."""
TEAM, TEAM_TURNS = 6, 6
"""Sub-agents of a session of the shape ``team``, and turns of each; all have one system prompt."""
ROWS = (
    ("per_request", "published", False),
    ("prefix_merging", "published", False),
    ("prefix_merging", "ours", False),
    ("prefix_merging", "ours", True),
)
"""Builder, batching, and whether shared prefixes are computed once (tree packing)."""


class PublishedBatching(Grpo):
    """Updates with a fixed number of traces, whichever sessions they belong to."""

    def _shuffle(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        shuffled = torch.randperm(len(rows), generator=self.order)
        for chosen in shuffled.tensor_split(math.ceil(len(rows) / self.config.sessions_per_update)):
            batch = [rows[i] for i in chosen.tolist()]
            weights = token_weights([row.sample for row in batch], self.config)
            yield [row._replace(weight=w) for row, w in zip(batch, weights, strict=True)]


def make_group(shape: str, scale: float) -> list[tuple[Call, ...]]:
    """Make the sessions of one task, which begin with the same prompt."""
    rng = np.random.default_rng(0)

    def text(length: float) -> Ids:
        return rng.integers(1, VOCABULARY, max(2, round(length * scale))).astype(np.int32)

    base = text(BASE)

    def add_calls(calls: list[Call], turns: int, kind: TraceKind, session: str) -> None:
        ids = base if kind is TraceKind.MAIN else np.concatenate((base, text(ADDED)))
        for turn in range(turns):
            answer = text(SAMPLED)
            answer[-1] = 0  # the end of a turn
            calls.append(
                Call(
                    session=session,
                    number=len(calls),
                    parent=len(calls) - 1 if turn else None,
                    branch=None if turn else Branch.NEW_THREAD if calls else None,
                    kind=kind,
                    thread=f"{kind}-{len(calls) - turn}",
                    dialect="synthetic",
                    messages=(),
                    sampling=Sampling(),
                    prompt_ids=ids,
                    sampled_ids=answer,
                    logprobs=np.full(len(answer), -math.log(VOCABULARY), np.float32),
                    versions=(VersionSpan(0, 0, len(answer)),),
                    finish=Finish.STOP,
                    engine="none",
                    timings=Timings(0.0),
                )
            )
            ids = np.concatenate((ids, answer, text(ADDED)))

    group = []
    for number in range(SESSIONS):
        calls: list[Call] = []
        add_calls(calls, TURNS if shape == "alone" else TURNS // 2, TraceKind.MAIN, str(number))
        for _ in range(TEAM if shape == "team" else 0):
            add_calls(calls, TEAM_TURNS, TraceKind.SUBAGENT, str(number))
        group.append(tuple(calls))
    return group


def train(scale: float, folder: Path | None) -> list[dict[str, Any]]:
    """Train one step with each builder on each shape. `folder` is that of a model."""
    torch.set_num_threads(1)
    rows = []
    for shape in ("alone", "team"):
        group = make_group(shape, scale)
        for builder, batching, packed in ROWS:
            trees = ", trees packed" if packed else ""
            sys.stderr.write(f"training: {shape}, {builder}, batches {batching}{trees}\n")
            rows.append({"shape": shape, **_step(group, builder, batching, folder, packed=packed)})
        slowest = rows[-len(ROWS)]
        for row in rows[-len(ROWS) :]:
            row["times_as_fast"] = round(slowest["seconds"] / row["seconds"], 2)
            row["times_fewer_updates"] = round(slowest["updates"] / row["updates"], 2)
    return rows


def device() -> str:
    """The GPU, if there is one, else one thread of the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "one thread of the CPU"


def _load(folder: Path | None) -> PreTrainedModel:
    """The model of a folder with weights in float32, or a tiny one."""
    torch.manual_seed(0)
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=1 << 18,
            )
        )
    return model.cuda() if torch.cuda.is_available() else model


def _now() -> float:
    """Seconds by the clock after all GPU work, or of CPU time without a GPU."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _step(
    group: Sequence[Sequence[Call]],
    builder: str,
    batching: str,
    folder: Path | None,
    *,
    packed: bool,
) -> dict[str, Any]:
    trajectories = []
    for number, calls in enumerate(group):
        built = find("builder", builder)().build(calls)
        trajectories.append(
            Trajectory(
                session=str(number),
                task="t",
                sample=number,
                status=Status.COMPLETED,
                traces=built.traces,
                ledger=built.ledger,
                reward=Reward(float(number % 2)),
            )
        )
    config = GrpoConfig(
        sessions_per_update=SESSIONS_PER_UPDATE,
        tree_packing=packed,
        autocast="bfloat16" if torch.cuda.is_available() else None,
        gradient_checkpointing=folder is not None,
        micro_tokens=16_384 if folder is None else GPU_TOKENS,
    )
    trainer = (PublishedBatching if batching == "published" else Grpo)(_load(folder), config)
    began = _now()
    report = trainer.step(trajectories, version=0)
    return {
        "builder": builder,
        "batching": batching,
        "packed": "yes" if packed else "no",
        "traces": report.samples,
        "updates": report.updates,
        "tokens_forwarded": report.tokens_forwarded,
        "tokens_trained": report.tokens_trained,
        "seconds": round(_now() - began, 2),
    }
