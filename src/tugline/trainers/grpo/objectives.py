"""Policy losses other than the default one, and functions of your own.

Each function has the signature `tugline.trainers.grpo.loss.Loss`; docs/objectives.md has formulas.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tugline import log, plugins
from tugline.errors import ConfigError
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.loss import Loss, LossResult, clip
from tugline.trainers.grpo.tokens import TrainedTokens, combine

_log = log.get("trainer")
_DUAL_CLIP = 3.0
"""Default bound of `dual_clip`."""
_DPPO = 20.0
"""Default bound of `dppo_tv` and `dppo_kl`."""


def dual_clip(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """`clip`, and at most ``-cap A`` for negative advantages (Ye et al., arXiv 1912.09729)."""
    loss, figures = clip(new, tokens, config)
    bound = -(config.ratio_cap or _DUAL_CLIP) * tokens.advantage
    capped = (tokens.advantage < 0) & (loss > bound)
    return torch.where(capped, bound, loss), figures | {"capped": capped}


def cispo(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """``-sg(clip(ratio)) A new``: weights are clipped, no token is left out (arXiv 2506.13585)."""
    ratio = tokens.compute_ratio(new, config).detach()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -bounded * tokens.advantage * new, {"ratio": ratio, "clipped": ratio != bounded}


def sapo(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """``-sigmoid(t (ratio - 1)) (4 / t) A``: a smooth gate instead of a clip (arXiv 2511.20347)."""
    ratio = tokens.compute_ratio(new, config)
    positive = torch.full_like(ratio, config.sapo_positive)
    temperature = torch.where(tokens.advantage > 0, positive, config.sapo_negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -gate * tokens.advantage, {"ratio": ratio}


def dppo_tv(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """Mask tokens whose probability moved further than a bound (DPPO, arXiv 2602.04879)."""
    moved = torch.exp(new.detach()) - torch.exp(tokens.old)
    rising = tokens.advantage > 0
    valid = torch.where(rising, moved <= config.clip_high, moved >= -config.clip_low)
    return _apply_trust_region(new, tokens, config, valid)


def dppo_kl(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """`dppo_tv` with the divergence of the token against all others (arXiv 2602.04879)."""
    now = torch.exp(new.detach())
    old = torch.exp(tokens.old)
    others = torch.log((1 - old + 1e-8) / (1 - now + 1e-8))
    divergence = old * (tokens.old - new.detach()) + (1 - old) * others
    rising = tokens.advantage > 0
    bound = torch.where(rising, torch.full_like(old, config.clip_high), config.clip_low)
    back = torch.where(rising, now <= old, now >= old)
    return _apply_trust_region(new, tokens, config, back | (divergence <= bound))


def _apply_trust_region(
    new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig, valid: torch.Tensor
) -> LossResult:
    """Return ``-sg(min(ratio, cap)) A new`` where `valid`, else 0."""
    ratio = torch.exp(new.detach() - tokens.old)
    bounded = ratio.clamp(max=config.ratio_cap or _DPPO)
    loss = -tokens.advantage * bounded * new * valid
    return loss, {"ratio": ratio, "clipped": ~valid, "capped": ratio != bounded}


def gmpo(new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
    """``-A`` times the geometric mean of a trace's clipped ratios (GMPO, arXiv 2507.20673).

    Log ratios are clipped to ``-clip_low`` and ``clip_high``, on the side of the advantage.
    """
    log_ratio = new - tokens.old
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    rising = tokens.advantage > 0
    least = torch.where(
        rising, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
    )
    ratio = torch.exp(combine(least, tokens.lengths, "trace"))
    return -ratio * tokens.advantage, {"ratio": ratio, "clipped": log_ratio != least}


BUILT_IN: Mapping[str, Loss] = {
    each.__name__: each for each in (clip, dual_clip, cispo, sapo, dppo_tv, dppo_kl, gmpo)
}


# --------------------------------------------------------------------------- your own
def find_loss(name: str) -> Loss:
    """Return a built-in loss, or a checked ``module:function``. Raises `UnknownPlugin`."""
    return BUILT_IN.get(name) or CustomLoss(name)


class CustomLoss:
    """A loss function of the user, whose result is checked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function: Callable[..., Any] = plugins.find("grpo.loss", name)

    def __call__(self, new: torch.Tensor, tokens: TrainedTokens, config: GrpoConfig) -> LossResult:
        """Call the function. Raises `ConfigError` for a result of another kind or shape."""
        if not len(new):
            return new * 0, {}
        result = self.function(new, tokens, config)
        problem = _find_problem(result, new)
        if problem is not None:
            sessions = ", ".join(tokens.sessions)
            msg = f"grpo.loss {self.name!r}: {problem} (sessions: {sessions})"
            raise ConfigError(msg, "grpo.loss")
        loss, figures = result
        wrong = {*tokens.session[~loss.detach().isfinite()].tolist()}
        if wrong:  # the update is skipped
            named = [tokens.sessions[number] for number in sorted(wrong)]
            _log.warning("losses are not finite", function=self.name, sessions=named)
        return loss, dict(figures)


def _find_problem(result: object, new: torch.Tensor) -> str | None:
    """Return why the result of a function of the user is not a `LossResult`; None if it is."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        return "it must return a tensor of losses and a mapping of figures"
    loss, figures = result
    for what, values in (("the losses", loss), *figures.items()):
        if not isinstance(values, torch.Tensor):
            return f"{what} must be a tensor, not {type(values).__name__}"
        if values.shape != new.shape:
            shape = tuple(values.shape)
            return f"{what} must be of shape {tuple(new.shape)}, not {shape}"
    if loss.dtype != new.dtype:
        return f"the losses must be of {new.dtype}, not {loss.dtype}"
    return None if loss.requires_grad else "the losses have no gradient: they must depend on `new`"
