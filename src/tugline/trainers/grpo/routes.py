"""Experts of a mixture-of-experts model in training: replayed, compared, and balanced.

A token is trained under the experts that computed its context when it was sampled. Their weights
are those of the router being trained, so its gradient is that of the recorded routes.
"""

import re
from typing import Any

import torch
from transformers import PreTrainedModel

from tugline.errors import ConfigError
from tugline.inference.routers import Router, count_experts, get_top_k, use_routers
from tugline.trainers.grpo.distributed import add_up
from tugline.trainers.grpo.samples import RouterShape

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Routes:
    """The routers of a model of transformers."""

    def __init__(self, model: PreTrainedModel, *, balanced: bool = False) -> None:
        """`balanced` keeps what `balance` needs. Nothing is replayed until `replay` is called."""
        self.routers: list[Router] = use_routers(model)
        for router in self.routers:
            router.keeps_logits = balanced
        self._model = model
        self._depth = int(model.config.get_text_config().num_hidden_layers)
        self._blocks = [each for each in model.modules() if _has_experts(each)]
        self.forget()

    @property
    def shape(self) -> RouterShape:
        """Size of the routers."""
        first = self.routers[0]
        layers = [
            int(number[1])
            for name, module in self._model.named_modules()
            if module in self.routers and (number := _LAYER.search(name))
        ]
        size = (len(self.routers), count_experts(first), get_top_k(first))
        return RouterShape(*size, tuple(layers), self._depth)

    @property
    def has_experts(self) -> bool:
        """Whether the model has layers with experts."""
        return bool(self._blocks or self.routers)

    def find_problem(self) -> str | None:
        """Return why experts cannot be replayed; None if they can.

        A forward pass must have been computed before.
        """
        if len(self._blocks) > len(self.routers):
            known = f"{len(self.routers)} have a router that is known"
            return f"of its {len(self._blocks)} {type(self._blocks[0]).__name__} layers, {known}"
        for router in self.routers:
            if router.chosen is None:
                kind = type(router).__mro__[2].__name__
                return f"{kind} does not select its experts with torch.topk"
        sizes = {(count_experts(router), get_top_k(router)) for router in self.routers}
        return f"its layers differ in their experts ({sorted(sizes)})" if len(sizes) > 1 else None

    def replay(self, experts: torch.Tensor | None) -> None:
        """Set the experts of the next forward passes, ``(n, layers, top_k)``; see `MicroBatch`.

        They must stay set until the backward pass, in which checkpointed layers are run again.
        """
        for layer, router in enumerate(self.routers):
            router.replayed = None if experts is None else experts[:, layer]

    # ----------------------------------------------------------------- the routers' own choice
    def forget(self) -> None:
        """Forget what `compare` found."""
        self._changed = torch.zeros(len(self.routers), dtype=torch.float64)
        self._compared = 0

    @torch.no_grad()
    def compare(self, experts: torch.Tensor | None) -> None:
        """Compare the experts that the routers chose in the last pass with the replayed ones."""
        if experts is None:
            return
        known = experts[:, 0, 0] >= 0
        wanted = experts[known].sort(-1).values
        chosen = torch.stack([_get_choice(router)[known] for router in self.routers], 1)
        differs = (chosen.sort(-1).values != wanted).any(-1)
        self._changed = self._changed.to(experts.device) + differs.sum(0, dtype=torch.float64)
        self._compared += len(wanted)

    def take_shares(self, device: torch.device) -> list[float] | None:
        """Return the share of compared tokens whose experts differ, by layer; forget them.

        It is over all ranks, each of which must call this. None if nothing was compared.
        """
        *changed, compared = add_up([*self._changed.tolist(), float(self._compared)], device)
        self.forget()
        return [each / compared for each in changed] if compared else None

    # ----------------------------------------------------------------- balance
    def balance(self, real: torch.Tensor) -> torch.Tensor:
        """Return the load-balancing loss of the last pass, over its positions that are `real`.

        It is that of Switch Transformer (arXiv 2101.03961): the number of experts, times the sum
        over them of the share of tokens that took one, times the mean of its probability. Tokens
        of all layers are taken together, as in transformers.
        """
        count = self.shape.experts
        taken = torch.zeros(count, device=real.device)
        total = torch.zeros(count, device=real.device)
        for router in self.routers:
            assert router.logits is not None  # noqa: S101 - it keeps them, and a pass was computed
            indices = _get_choice(router)
            if router.replayed is not None:
                indices = torch.where(router.replayed < 0, indices, router.replayed.to(indices))
            ones = torch.ones_like(indices[real], dtype=taken.dtype).flatten()
            taken = taken.index_add(0, indices[real].flatten(), ones)
            total = total + router.logits[real].float().softmax(-1).sum(0)
        rows = len(self.routers) * real.sum()
        return count * (taken / rows * (total / rows)).sum()


def _get_choice(router: Router) -> torch.Tensor:
    assert router.chosen is not None  # noqa: S101 - a pass was computed
    return router.chosen


def _has_experts(module: Any) -> bool:
    experts = dict(module.named_children()).get("experts")
    return experts is not None and any(True for _ in experts.parameters())


def check_replay(routes: Routes, name: str, *, wanted: bool | str) -> bool:
    """Return whether `replay_experts` replays in a model of class `name`; see `check_routers`."""
    if wanted is False or (wanted == "auto" and not routes.has_experts):
        return False
    check_routers(routes, name, "replay_experts", "false")
    return True


def check_routers(routes: Routes, name: str, key: str, off: str) -> None:
    """Raise `ConfigError` if a setting needs routers that a model of class `name` does not have.

    `off` is the value that needs none.
    """
    problem = routes.find_problem() if routes.has_experts else "it has no experts"
    if problem is not None:
        msg = f"{key}: model {name} is not supported: {problem}. Set it to {off} to train without"
        raise ConfigError(msg, key)
