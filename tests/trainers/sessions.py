"""A small random model, and sessions whose log probabilities were captured from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from random_models import log_probabilities, qwen3
from tugline.trainers.grpo.batch import Row, pack, plain_sample
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.update import split_by_sample
from tugline.types import Ledger, Reason, Reward, Sample, Span, Status, Trace, Trajectory

VERSION = 5
PROMPT = np.random.default_rng(7).integers(0, 48, 40).astype(np.int32)


def tiny(seed: int = 0) -> Qwen3ForCausalLM:
    """A random model with a vocabulary of 48."""
    return qwen3(seed, max_position_embeddings=256)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """A copy of all weights in one vector, sharded ones whole."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def captured(model: torch.nn.Module, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log probabilities as an engine would report them; 0 for the first."""
    after = log_probabilities(model, ids, temperature).numpy()
    return np.concatenate([[0], after]).astype(np.float32)


def trace(model: torch.nn.Module, rng: np.random.Generator, **changes: object) -> Trace:
    """Shared prompt, own words, an answer, tool output, another answer."""
    own, first, tool, last = (int(n) for n in rng.integers(2, 12, 4))
    n = len(PROMPT) + own + first + tool + last
    ids = np.concatenate([PROMPT, rng.integers(0, 48, n - len(PROMPT))]).astype(np.int32)
    start = len(PROMPT) + own
    spans = (Span(0, start, start + first, VERSION), Span(1, n - last, n, VERSION))
    mask = np.zeros(n, np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    logprobs = np.where(mask, captured(model, ids), 0).astype(np.float32)
    fields: dict[str, object] = {"ids": ids, "mask": mask, "logprobs": logprobs, "spans": spans}
    return Trace(**(fields | changes))  # type: ignore[arg-type]


def session(traces: Sequence[Trace], *, task: str, sample: int, reward: float | None) -> Trajectory:
    """A finished session with a ledger that fits its traces."""
    trained = sum(int(trace_.mask.sum()) for trace_ in traces)
    return Trajectory(
        session=f"{task}/{sample}",
        task=task,
        sample=sample,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        traces=tuple(traces),
        ledger=Ledger(sampled=trained + 2, trained=trained, masked={Reason.ABORTED: 2}),
        reward=None if reward is None else Reward(reward),
    )


def groups(model: torch.nn.Module, *, tasks: int = 2, samples: int = 4) -> list[Trajectory]:
    """Every first session of a task has two traces; even ones succeed."""
    rng = np.random.default_rng(1)
    return [
        session(
            [trace(model, rng) for _ in range(2 if j == 0 else 1)],
            task=f"t{i}",
            sample=j,
            reward=float(j % 2 == 0),
        )
        for i in range(tasks)
        for j in range(samples)
    ]


def recaptured(original: Trajectory, change: Callable[[Trace], np.ndarray]) -> Trajectory:
    """A session whose engine reported other log probabilities: what `change` makes of a trace."""
    traces = [
        replace(trace_, logprobs=np.where(trace_.mask, change(trace_), 0).astype(np.float32))
        for trace_ in original.traces
    ]
    return replace(original, traces=tuple(traces))


def sample(ids: Sequence[int], mask: Sequence[bool], **changes: object) -> Sample:
    """A trace on its way to the trainer, captured at probability 1; advantages are 0."""
    plain = plain_sample(np.array(ids, np.int32), np.array(mask, np.bool_))
    return replace(plain, **{"advantages": plain.advantages.copy()} | changes)


class Passed(NamedTuple):
    """What forward and backward passes over some samples gave."""

    tokens: int
    """Computed, without padding."""
    logprobs: list[np.ndarray]
    """Of the trained tokens of each sample."""
    gradient: torch.Tensor
    """Of a sum of them that weights each token and each sample by itself."""


def make_rows(samples: Sequence[Sample]) -> list[Row]:
    """A weight for each sample."""
    total = sum(int(row.loss_mask.sum()) for row in samples)
    return [Row(row, weight=1 / (total + number)) for number, row in enumerate(samples)]


def run_policy(model: torch.nn.Module, samples: Sequence[Sample], config: GrpoConfig) -> Passed:
    """Compute samples in as many passes as `config` allows."""
    policy = PolicyModel(model, config)
    model.zero_grad()
    tokens, logprobs = 0, {}
    for micro in pack(make_rows(samples), config, policy.device):
        tokens += micro.computed - micro.padding
        new = policy.logprobs(micro)
        (new * micro.weight * micro.advantage).sum().backward()
        logprobs |= {id(part.sample): part.logprobs for part in split_by_sample(new.detach(), micro)}
    return Passed(tokens, [logprobs[id(row)] for row in samples], gradient(model))
