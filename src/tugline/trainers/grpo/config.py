"""Every knob of the GRPO trainer, each with the sentence that says what it does.

Strict and frozen: an unknown key is an error, and the digest of a config stands in every
checkpoint, so a resumed run can tell whether it was changed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from tugline.config import Config
from tugline.trainers.grpo.advantage import Estimator

RewardOf = Literal["outcome", "per_trace", "discounted"]
Normalisation = Literal["token", "sequence", "constant"]


class GrpoConfig(Config):
    """How a policy is updated from graded sessions; docs/training.md has the formulas."""

    reward: RewardOf = "outcome"
    """What a trained token earned: `outcome`, what its session did; `per_trace`, what its trace did
    where the evaluator said so; `discounted`, the outcome, the less the earlier its turn."""
    turn_discount: float | None = Field(default=None, gt=0, le=1)
    """What remains of the advantage from one turn to the turn before it, above 0 and at most 1
    (`discounted` only)."""
    advantage: Estimator = "grpo"
    """Baseline and scale of a session's advantage within its group."""
    advantage_eps: float = Field(default=1e-6, ge=0)
    """Added to the group's standard deviation before dividing by it (`grpo` only)."""
    skip_zero_variance: bool = False
    """Leave out groups whose sessions all earned the same (the dynamic filter of DAPO)."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Tokens sampled more than this many policy versions ago are masked; None accepts all."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped below at 1 minus this."""
    clip_high: float = Field(default=0.28, ge=0)
    """The probability ratio is clipped above at 1 plus this."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling between engine and trainer, with this cap; None turns it off
    and takes the captured log probabilities for the old policy's."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty towards the reference model; 0 turns it off."""
    normalisation: Normalisation = "token"
    """What the summed token losses of an update are divided by."""
    constant_length: int = Field(default=1024, ge=1)
    """Tokens a session is taken to have (`constant` only)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature that the tasks sample at; log probabilities are those of that distribution."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the sessions of a step."""
    sessions_per_update: int = Field(default=64, ge=1)
    """Most sessions that one optimizer update learns from, each with all of its traces."""
    micro_tokens: int = Field(default=16_384, ge=1)
    """Most tokens, padding included, in one forward pass; a longer trace goes alone."""
    share_prefix: bool = False
    """Compute the ids that all traces of a forward pass begin with only once."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after the warm-up."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly to `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm."""
    seed: int = 0
    """Seed of the order in which sessions are dealt to updates."""

    @field_validator("turn_discount")
    @classmethod
    def _fits(cls, value: float | None, info: ValidationInfo) -> float | None:
        reward = info.data.get("reward", "outcome")
        if reward == "discounted" and value is None:
            msg = "is missing: reward 'discounted' needs a number above 0, at most 1"
            raise ValueError(msg)
        if reward != "discounted" and value is not None:
            msg = (
                f"has no effect with reward {reward!r}: leave it out, or set reward to 'discounted'"
            )
            raise ValueError(msg)
        return value

    def digest(self) -> str:
        """Sixteen hex digits that change with any field."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]
