"""Sessions of a model with experts: sampled, with the experts and kept sets of their tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from inference.test_sampling import ROW
from support.families import make_family
from trainers.forced import find_routers
from trainers.sessions import PROMPT, VERSION, session
from tugline.inference.routers import read_experts, use_routers
from tugline.inference.sampling import sample, uniforms
from tugline.types import Distribution, Ids, Kept, Span, Trace, Trajectory

PLAIN = Distribution()
SCALE = 3.0
"""Factor of the experts' weights, so that experts matter."""


def make_moe(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Two layers of eight experts, two for each token, whose choice changes logprobs a lot."""
    model = make_family("qwen3_moe", seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.mul_(SCALE)
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the default one has no float64
    return model.to(dtype)


class SmallEngine:
    """A copy of a model that samples without a cache, with the embedded engine's sampler."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model).eval()
        self._routers = use_routers(self._model)

    @torch.no_grad()
    def answer(
        self, context: Ids, distribution: Distribution, count: int, seed: int
    ) -> tuple[list[int], list[float], list[Ids]]:
        """Sampled ids, their logprobs, and the set of each."""
        ids = context.tolist()
        logprobs = []
        kept = []
        row = np.array(
            [
                (
                    distribution.temperature,
                    distribution.top_p,
                    distribution.top_k,
                    distribution.min_p,
                )
            ],
            ROW,
        )
        for at in range(count):
            logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
            point = uniforms(np.array([seed], np.uint64), np.array([at], np.int32))
            drawn = sample(logits, row, point)
            ids.append(int(drawn.tokens[0]))
            logprobs.append(float(drawn.logprobs[0]))
            one = drawn.kept[0]
            kept.append(np.empty(0, np.int32) if one is None else one)
        return ids[len(context) :], logprobs, kept

    @torch.no_grad()
    def play(self, distributions: Sequence[Distribution], seed: int) -> Trace:
        """A trace of an answer under each distribution, with tool output before it."""
        rng = np.random.default_rng(seed)
        ids, spans = PROMPT, []
        logprobs: list[float] = [0.0] * len(ids)
        kept: list[Ids] = [np.empty(0, np.int32)] * len(ids)
        for call, distribution in enumerate(distributions):
            tool = rng.integers(0, 48, int(rng.integers(2, 6)))
            ids = np.concatenate([ids, tool]).astype(np.int32)
            sampled, own, sets = self.answer(ids, distribution, int(rng.integers(3, 9)), seed)
            end = len(ids) + len(sampled)
            spans.append(Span(call, len(ids), end, VERSION, distribution=distribution))
            logprobs += [0.0] * len(tool) + own
            kept += [np.empty(0, np.int32)] * len(tool) + sets
            ids = np.concatenate([ids, sampled]).astype(np.int32)
        mask = np.zeros(len(ids), np.bool_)
        for span in spans:
            mask[span.start : span.end] = True
        self._model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        return Trace(
            ids=ids,
            mask=mask,
            logprobs=np.array(logprobs, np.float32),
            spans=tuple(spans),
            experts=read_experts(self._routers)[:-1],
            kept=Kept.of(kept),
        )


def play_groups(
    model: PreTrainedModel, *distributions: Distribution, tasks: int = 1, samples: int = 4
) -> list[Trajectory]:
    """Groups of sessions of one trace, every second of which succeeds."""
    engine = SmallEngine(model)
    return [
        session(
            [engine.play(distributions or (PLAIN, PLAIN), seed=10 * i + j)],
            task=f"t{i}",
            sample=j,
            reward=float(j % 2),
        )
        for i in range(tasks)
        for j in range(samples)
    ]


def allow_noise(model: PreTrainedModel) -> None:
    """Make routers of Qwen3-MoE those of `add_noise`, at first without noise."""
    for router in find_routers(model):
        router.__class__ = type("NoisyRouter", (_Noisy, type(router)), {})


def add_noise(model: torch.nn.Module, noise: float = 1.0) -> None:
    """Add noise to the selection of every router, but not to its logits or weights."""
    for router in find_routers(model):
        router.noise = noise


class _Noisy(torch.nn.Module):
    """Qwen3-MoE's router with another selection."""

    noise = 0.0

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Select among scores with noise; the weights are those of the scores."""
        logits = torch.nn.functional.linear(states.reshape(-1, states.shape[-1]), self.weight)
        scores = torch.softmax(logits, -1)
        noise = self.noise * torch.randn_like(scores)
        indices = torch.topk(scores.detach() + noise, self.top_k, dim=-1).indices
        values = scores.gather(-1, indices)
        return logits, values / values.sum(-1, keepdim=True), indices
