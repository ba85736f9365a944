"""A small random model, and sessions with log probabilities of that model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from support.models import log_probabilities, make_qwen3
from tugline.trainers.grpo.batch import Row, plain_sample
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.forward import PolicyModel
from tugline.trainers.grpo.packing import Costs, pack
from tugline.trainers.grpo.update import split_by_sample
from tugline.types import Ledger, Reason, Reward, Sample, Span, Status, Trace, Trajectory

VERSION = 5
PROMPT = np.random.default_rng(7).integers(0, 48, 40).astype(np.int32)


def tiny(seed: int = 0) -> Qwen3ForCausalLM:
    """A random model with a vocabulary of 48."""
    return make_qwen3(seed, max_position_embeddings=256)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """A copy of all weights in one vector; sharded ones are gathered."""
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
    """A prompt that all share, own tokens, an answer, tool output, another answer."""
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
    """A finished session; its ledger agrees with its traces."""
    trained = sum(int(each.mask.sum()) for each in traces)
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
    """Groups whose first sessions have two traces, and whose even ones succeed."""
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
    """The session with other log probabilities: `change(trace)`."""
    traces = [
        replace(each, logprobs=np.where(each.mask, change(each), 0).astype(np.float32))
        for each in original.traces
    ]
    return replace(original, traces=tuple(traces))


def sample(ids: Sequence[int], mask: Sequence[bool], **changes: object) -> Sample:
    """A sample whose tokens had probability 1; advantages are 0."""
    plain = plain_sample(np.array(ids, np.int32), np.array(mask, np.bool_))
    return replace(plain, **{"advantages": plain.advantages.copy()} | changes)


class PassResult(NamedTuple):
    """Results of forward and backward passes over some samples."""

    tokens: int
    """Computed, without padding."""
    logprobs: list[np.ndarray]
    """Of the trained tokens of each sample."""
    gradient: torch.Tensor
    """Of their sum, with a weight of each sample and each token."""


def run_policy(model: torch.nn.Module, samples: Sequence[Sample], config: GrpoConfig) -> PassResult:
    """Compute samples in the micro-batches of `config`."""
    policy = PolicyModel(model, config)
    model.zero_grad()
    total = sum(int(each.loss_mask.sum()) for each in samples)
    rows = [Row(each, weight=1 / (total + number)) for number, each in enumerate(samples)]
    tokens, logprobs = 0, {}
    for micro in pack(rows, config, policy.device, Costs()):
        tokens += micro.computed - micro.padding
        new = policy.logprobs(micro)
        (new * micro.weight * micro.advantage).sum().backward()
        logprobs |= {id(row.sample): row.logprobs for row in split_by_sample(new.detach(), micro)}
    return PassResult(tokens, [logprobs[id(each)] for each in samples], gradient(model))
