"""Routers of mixture-of-experts models: what they chose, and a choice to take instead.

A router of transformers computes a score of each expert, selects the experts with ``torch.topk``,
and takes their weights from the scores. Here only that selection is observed or replaced, so every
family keeps its own scores, weights and gradient: an expert that is replayed gets the weight that
the current router gives it, also if the router would not have considered its group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tugline.types import Experts

_TOP_K = (torch.topk, torch.Tensor.topk)


class Router(torch.nn.Module):
    """Mixed into the class of a router, see `use_routers`. Experts have the shape ``(n, top_k)``.

    The tokens of a forward pass are flattened, as for transformers' routers.
    """

    replayed: torch.Tensor | None = None
    """Experts to take; -1 leaves a token's choice to the router. None leaves all."""
    chosen: torch.Tensor | None = None
    """Experts that the router itself chose in the last forward pass."""
    logits: torch.Tensor | None = None
    """Logits of the last forward pass, shape ``(n, experts)``, with their gradient."""
    keeps_logits: bool = False
    """Whether `logits` is set, which keeps them in memory until the next pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the router with its selection observed and replaced."""
        compute: Any = super().forward
        with _Selection(self):
            return compute(*args, **kwargs)


class _Selection(TorchFunctionMode):
    """Observes and replaces the selection of the experts among all."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router
        self._size = count_experts(router), get_top_k(router)
        self._masked: tuple[torch.Tensor, torch.Tensor] | None = None
        """Scores in which some groups of experts are masked, and the same without the mask."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOP_K:
            scores = args[0] if args else (kwargs or {})["input"]
            sizes = scores.shape[-1], result.indices.shape[-1]
            if scores.ndim == 2 and sizes == self._size:  # others select groups of experts
                return self._select(scores, result)
        elif func is torch.Tensor.masked_fill:
            self._masked = result, args[0]
        elif func is torch.nn.functional.linear and result.shape[-1] == self._size[0]:
            self._router.logits = result if self._router.keeps_logits else None
        return result

    def _select(self, scores: torch.Tensor, own: Any) -> Any:
        """Return the result of ``topk`` with the experts that are replayed."""
        router = self._router
        router.chosen = own.indices.detach()
        if router.replayed is None:
            return own
        if self._masked is not None and self._masked[0] is scores:
            scores = self._masked[1]
        replayed = router.replayed.to(scores.device, own.indices.dtype)
        indices = torch.where(replayed < 0, own.indices, replayed)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def count_experts(router: torch.nn.Module) -> int:
    """Return the number of experts among which a router selects."""
    return int(cast("Any", router).num_experts)


def read_experts(routers: Sequence[Router]) -> Experts:
    """Return the experts that the routers chose in the last forward pass.

    The shape is ``(n, layers, top_k)``.
    """
    chosen = torch.stack([cast("torch.Tensor", router.chosen) for router in routers], 1)
    kind = np.min_scalar_type(max(map(count_experts, routers)) - 1)
    return chosen.cpu().numpy().astype(kind)


def get_top_k(router: torch.nn.Module) -> int:
    """Return the number of experts that a router selects for a token."""
    return int(cast("Any", router).top_k)


def use_routers(model: torch.nn.Module) -> list[Router]:
    """Make the routers of a model instances of `Router`; return them in the order of the layers.

    The list is empty for a model without experts. A second call returns the same routers.
    """
    routers = [each for each in model.modules() if _is_router(each)]
    for router in routers:
        if not isinstance(router, Router):
            kind = type(router)
            router.__class__ = type(f"Observed{kind.__name__}", (Router, kind), {})
    return cast("list[Router]", routers)


def _is_router(module: torch.nn.Module) -> bool:
    parts = ("top_k", "num_experts", "weight")
    return type(module).__name__.endswith("Router") and all(hasattr(module, p) for p in parts)
