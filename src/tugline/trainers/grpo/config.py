"""Settings of the GRPO trainer.

Strict and frozen: an unknown key is an error.
"""

from typing import Annotated, Literal

from msgspec import Meta

from tugline.config import Config
from tugline.errors import ConfigError
from tugline.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Estimator = Literal["grpo", "dr_grpo", "rloo"]
Normalisation = Literal["token", "sequence", "constant"]
Level = Literal["token", "trace"]


class UpdateConfig(Config, frozen=True):
    """Settings of optimizer updates, independent of the loss."""

    sessions_per_update: PositiveInt = 64
    """Most sessions that one optimizer update learns from, each with all of its traces."""
    micro_tokens: PositiveInt = 16_384
    """Most tokens in one forward pass, those of a common beginning counted once, padding
    included; a longer trace goes alone."""
    tree_packing: bool = True
    """Compute what traces of a forward pass have in common once; needs full attention in every
    layer."""
    gradient_checkpointing: bool = False
    """Compute the activations of each layer again in the backward pass instead of keeping them."""
    logits_chunk: PositiveInt = 1024
    """Tokens whose logits are in memory at the same time."""
    autocast: Literal["bfloat16"] | None = None
    """Type that forward passes compute in; weights stay float32. None computes in theirs."""

    lr: PositiveFloat = 1e-6
    """Highest learning rate of AdamW, which it has after the warm-up."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly to `lr`."""
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the learning rate's decay after the warm-up (with `decay_updates` only)."""
    decay_updates: PositiveInt | None = None
    """Updates, those of the warm-up included, after which the learning rate has fallen to
    `final_lr`; None: it stays at `lr`."""
    final_lr: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of `lr` that is left at the end of the decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient is scaled down to this norm."""
    seed: int = 0
    """Seed of the order of sessions in updates."""

    def __post_init__(self) -> None:
        """Check that options fit together. Raises `ConfigError`."""
        super().__post_init__()
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            msg = f"decay_updates is {self.decay_updates}, must be more than warmup_updates, which"
            msg += f" is {self.warmup_updates}: the decay begins after the warm-up"
            raise ConfigError(msg, "decay_updates")


class GrpoConfig(UpdateConfig, frozen=True):
    """Settings of policy updates from graded sessions; docs/training.md has the formulas."""

    reward: Literal["outcome", "per_trace"] = "outcome"
    """Reward of a trained token: `outcome`, that of its session; `per_trace`, that of its trace
    if the evaluator gives one."""
    turn_discount: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Factor on the advantage from one turn to the turn before it; None: all turns have the same.
    """
    advantage: Estimator = "grpo"
    """Baseline and scale of a session's advantage within its group."""
    advantage_eps: NonNegativeFloat = 1e-4
    """Added to the group's standard deviation before dividing by it (`grpo` only)."""
    drop_truncated: bool = False
    """Train nothing of sessions whose agent was stopped at a limit, or that spent a budget of model
    calls (the overlong filter of DAPO); their reward still counts in the group's mean."""
    max_staleness: NonNegativeInt | None = None
    """Tokens sampled more than this many policy versions ago are masked; None accepts all."""

    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """The probability ratio is clipped below at 1 minus this."""
    clip_high: NonNegativeFloat = 0.28
    """The probability ratio is clipped above at 1 plus this."""
    ratio_level: Level = "token"
    """Whether each token has its own ratio, or all of a trace their geometric mean (GSPO)."""
    importance: Literal["truncate", "mask"] | None = None
    """Importance sampling between engine and trainer: a weight out of its bounds is moved to the
    nearest one, or its token is masked. None takes the captured log probabilities for the old
    policy's."""
    importance_level: Level = "token"
    """Whether each token has its own weight, or all of a trace their geometric mean."""
    importance_low: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Lower bound of the importance weight; 1 is that of a token that engine and trainer agree on.
    """
    importance_high: Annotated[float, Meta(ge=1)] = 2.0
    """Upper bound of the importance weight."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL penalty towards the reference model; 0 turns it off."""
    kl_correction: bool = False
    """Multiply the penalty by the token's ratio, so that it is unbiased for older tokens, too."""
    normalisation: Normalisation = "token"
    """Divisor of the summed token losses of an update."""
    constant_length: PositiveInt = 1024
    """Tokens a session is taken to have (`constant` only)."""

    epochs: PositiveInt = 1
    """Passes over the sessions of a step."""
