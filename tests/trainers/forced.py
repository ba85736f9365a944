"""Experts that a model is forced to take, without the routers of `tugline.inference.routers`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def force(model: torch.nn.Module, experts: torch.Tensor) -> None:
    """Make each router take its part of `experts`, ``(n, layers, top_k)``, for any token.

    The weights of all experts are those that the router gives if it takes all. Those of the forced
    ones are a part of them, with the same sum as before if the router normalises them.
    """
    for layer, router in enumerate(find_routers(model)):
        compute = partial(type(router).forward, router)
        router.forward = partial(_compute, router, compute, experts[:, layer])  # type: ignore[method-assign]


def find_routers(model: torch.nn.Module) -> list[Any]:
    """The routers of a model, by the names of their classes, in order."""
    named = [each for each in model.modules() if type(each).__name__.endswith("Router")]
    return [each for each in named if hasattr(each, "top_k")]


def _compute(router: Any, compute: Any, experts: torch.Tensor, *args: Any) -> Any:
    own = compute(*args)[1]
    sums = own.detach().sum(-1)
    normalised = bool((sums - sums[0]).abs().max() < 1e-5)
    top_k = router.top_k
    groups = getattr(router, "topk_group", None)
    router.top_k = router.num_experts
    if groups is not None:
        router.topk_group = router.num_group
    logits, weights, order = compute(*args)
    router.top_k = top_k
    if groups is not None:
        router.topk_group = groups
    everything = torch.zeros_like(logits, dtype=weights.dtype).scatter(1, order, weights)
    taken = everything.gather(1, experts)
    if normalised:
        taken = taken / taken.sum(-1, keepdim=True) * sums[0]
    return logits, taken, experts
