"""Log probabilities of targets from logits over the vocabulary, in the memory of the logits.

`TargetScores` also returns the entropy of each distribution, for the entropy bonus.
"""

from typing import Any

import numpy as np
import torch

from tugline.types import Kept


class TargetLogprobs(torch.autograd.Function):
    """Log probabilities of targets, in the memory of the logits, which nothing else may use.

    Arrays over the vocabulary are the largest of a pass, and autograd would make six of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        kept: Kept | None,
    ) -> torch.Tensor:
        """Return the log probability of a target of each row, shape ``(n,)``.

        Where a row's set in `kept` is not empty, it is the probability among the ids of the set.
        """
        total = _normalise(logits, temperature, kept)
        ctx.save_for_backward(logits, total, target, temperature)
        return logits.gather(1, target[:, None])[:, 0] - total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of the logits: ``(one-hot - probabilities) / temperature``."""
        logits, total, target, temperature = ctx.saved_tensors
        factor = (gradient / temperature)[:, None]
        result = logits.sub_(total[:, None]).exp_().mul_(-factor)
        return result.scatter_add_(1, target[:, None], factor.to(result.dtype)), None, None, None


class TargetScores(torch.autograd.Function):
    """`TargetLogprobs`, and the entropy of the distribution of each row, in nats.

    Neither pass keeps another array over the vocabulary than the logits; each makes one for a
    moment.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        kept: Kept | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log probabilities and entropies, both of shape ``(n,)``."""
        total = _normalise(logits, temperature, kept)
        shares = (logits - total[:, None]).exp_()
        entropy = torch.special.entr(shares, out=shares).sum(1)
        ctx.save_for_backward(logits, total, target, temperature, entropy)
        return logits.gather(1, target[:, None])[:, 0] - total, entropy

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, of_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of the logits.

        It is ``(g (one-hot - p) - h p (log p + entropy)) / temperature`` for gradients ``g`` of the
        log probability and ``h`` of the entropy.
        """
        logits, total, target, temperature, entropy = ctx.saved_tensors
        factor = (gradient / temperature)[:, None]
        spread = (of_entropy / temperature)[:, None]
        logarithms = logits.sub_(total[:, None])
        shares = logarithms.exp()
        # where a share is 0, its logarithm may be infinite
        result = logarithms.clamp_(min=_LEAST).add_(entropy[:, None]).mul_(-spread).sub_(factor)
        result.mul_(shares)
        return result.scatter_add_(1, target[:, None], factor.to(result.dtype)), None, None, None


_LEAST = -1e4
"""Logarithm of a share that is 0 in float64, too."""


def _normalise(logits: torch.Tensor, temperature: torch.Tensor, kept: Kept | None) -> torch.Tensor:
    """Divide logits by the temperatures and restrict them, in place; return their logsumexp."""
    logits.div_(temperature[:, None])
    if kept is not None:
        _leave_out_others(logits, kept)
    largest = logits.amax(1, keepdim=True)
    return (logits - largest).exp_().sum(1).log_().add_(largest[:, 0])


def _leave_out_others(logits: torch.Tensor, kept: Kept) -> None:
    """Set the logits outside of a row's set to minus infinity, unless the set is empty."""

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(logits.device)

    rows = tensor(np.repeat(np.arange(len(kept)), kept.sizes))
    ids = tensor(kept.ids)
    values = logits[rows, ids]
    logits.index_fill_(0, tensor(np.flatnonzero(kept.sizes)), -torch.inf)
    logits[rows, ids] = values
