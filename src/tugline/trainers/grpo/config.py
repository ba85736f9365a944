"""Settings of the GRPO trainer.

Strict and frozen: an unknown key is an error.
"""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from tugline.config import Config
from tugline.errors import ConfigError
from tugline.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "max_rl"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
CREDITS = ("session", "call", "trace", "return")
"""Built-in rules of credit."""
LOSSES = ("clip", "dual_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "gmpo")
"""Built-in losses."""
Deviation = Literal["sample", "population"]
Normalisation = Literal["token", "sequence", "constant"]
Level = Literal["token", "trace"]
WeightLevel = Literal["token", "trace", "product"]
Treatment = Literal["train", "mask", "penalise"]
Effort = Literal["tokens", "turns", "seconds"]


class UpdateConfig(Config, frozen=True):
    """Settings of optimizer updates, independent of the loss."""

    sessions_per_update: PositiveInt = 64
    """Maximum sessions per optimizer update, each with all of its traces."""
    micro_tokens: PositiveInt | None = None
    """Maximum tokens per forward pass, including padding; tokens of a shared prefix count once. A
    longer trace has a pass of its own. None: the context window of the run, or 16,384 if that is
    not known."""
    tree_packing: bool | Literal["auto"] = "auto"
    """Compute a prefix shared by traces of a forward pass once; needs layers of full attention or
    gated delta nets. `auto`: if the model supports it, which the first lines of a run say."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute the activations of each layer in the backward pass instead of storing them. `auto`:
    if the model has at least 500 million weights."""
    offload_activations: bool = False
    """Keep the inputs of the layers in the memory of the host until the backward pass; needs
    `gradient_checkpointing`."""
    logits_chunk: PositiveInt = 1024
    """Number of tokens whose logits are in memory at the same time."""
    autocast: Literal["bfloat16"] | None = None
    """Data type of forward passes; weights stay float32. None: the type of the weights."""

    load_balancing: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a model with experts (Switch Transformer); 0 turns it
    off."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW, reached after the warm-up."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly to `lr`."""
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the learning rate's decay after the warm-up (with `decay_updates` only)."""
    decay_updates: PositiveInt | None = None
    """Number of updates, including the warm-up, after which the decay ends; None: the learning rate
    stays at `lr`."""
    final_lr: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Learning rate at the end of the decay, as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum norm of the gradient; a larger gradient is scaled down."""
    seed: int = 0
    """Seed of the order of sessions in updates."""

    def __post_init__(self) -> None:
        """Check that options fit together. Raises `ConfigError`."""
        super().__post_init__()
        if self.offload_activations and self.gradient_checkpointing is False:
            msg = "offload_activations is true, which requires gradient_checkpointing: without it,"
            raise ConfigError(f"{msg} layers keep more than their inputs", "offload_activations")
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            msg = (
                f"decay_updates is {self.decay_updates}, must be greater than warmup_updates, which"
            )
            msg += f" is {self.warmup_updates}: the decay begins after the warm-up"
            raise ConfigError(msg, "decay_updates")


class GrpoConfig(UpdateConfig, frozen=True):
    """Settings of policy updates from rewarded sessions; docs/grpo.md has the formulas."""

    credit: str = "session"
    """Reward of a trained token: that of its `session`; of its `call` or `trace`, if the evaluator
    gives one; the sum of the rewards of its call and all later ones (`return`); or that of a
    function of your own as `module:function`."""
    turn_discount: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Factor of a reward for each turn between a call and the later one that earned it (`return`
    only); None: no discount."""
    malformed: Treatment = "train"
    """What to do with answers that have a malformed tool call: `train` them like others, `mask`
    them, or subtract `call_penalty` from their reward (`penalise`)."""
    truncated: Treatment = "train"
    """The same for answers that ended at their token limit, and for all answers of sessions whose
    agent was stopped at a limit, or that used up a budget of model calls; `mask` leaves such
    sessions out (overlong filtering of DAPO), their rewards still count in the group's mean."""
    repeated: Treatment = "train"
    """The same for answers that repeat the tool calls of those before them, see `repeated_calls`.
    """
    repeated_calls: Annotated[int, Meta(ge=2)] = 3
    """Number of equal answers in a row from which on an answer is a repeated one: its tool calls
    have the same names and arguments as those of the answers directly before it."""
    call_penalty: NonNegativeFloat = 0.1
    """What `penalise` subtracts from the reward of a call, once for each kind."""
    efficiency: Effort | None = None
    """Measure of the effort of a session: sampled `tokens`, `turns`, or `seconds` that the agent
    ran. The reward of solved sessions rises the less effort they took, see `efficiency_weight`;
    None: it does not."""
    efficiency_weight: NonNegativeFloat = 0.1
    """What is added to the reward of a solved session, times the share of the effort that it saved
    against the solved session of its group with the most."""
    overlong_length: PositiveInt | None = None
    """Number of sampled tokens of a session from which the whole `overlong_penalty` is subtracted
    from its reward; None: no penalty."""
    overlong_buffer: PositiveInt = 4096
    """Number of tokens before `overlong_length` over which the penalty rises from 0."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Penalty at `overlong_length`; it rises further beyond it."""
    kl_reward: NonNegativeFloat = 0.0
    """Weight of the log ratio of policy and reference, summed over a session's trained tokens and
    subtracted from its reward; 0 turns it off. It needs two more forward passes with `importance`,
    else one."""
    advantage: str = "grpo"
    """Baseline and scale of a session's advantage within its group: `grpo`, `dr_grpo`, `rloo`,
    `reinforce_plus_plus`, `max_rl`, or a function of your own as `module:function`."""
    advantage_std: Deviation = "sample"
    """Standard deviation of a group (`grpo` only): that of a sample, which divides by the number of
    sessions less one, as TRL and verl do, or that of a population."""
    advantage_eps: NonNegativeFloat = 1e-4
    """Added to the group's standard deviation before dividing by it (`grpo` only)."""
    replay_experts: bool | Literal["auto"] = "auto"
    """Compute each token with the experts that the engine computed it with; tokens whose experts it
    did not report are masked. `auto`: if the model has experts."""
    max_staleness: NonNegativeInt | None = None
    """Maximum age of a token in policy versions; older tokens are masked. None: no limit."""

    loss: str = "clip"
    """Policy loss of a token: `clip`, `dual_clip`, `cispo`, `sapo`, `dppo_tv`, `dppo_kl`, `gmpo`,
    or a function of your own as `module:function`."""
    digests: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    """SHA-256 of the file of each function of your own, under `loss`, `advantage` and `credit`;
    filled in when a run starts. A run whose file has another one is refused."""
    reference: bool = False
    """Compute the log probabilities of the reference model although `kl` and `kl_reward` are 0, for
    a loss of your own."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """The probability ratio is clipped below at `1 - clip_low`; see docs/objectives.md for losses
    other than `clip`."""
    clip_high: NonNegativeFloat = 0.28
    """The probability ratio is clipped above at `1 + clip_high`."""
    ratio_cap: Annotated[float, Meta(ge=1)] | None = None
    """Upper bound of the ratio of tokens with a negative advantage (`dual_clip`, None: 3) or of all
    tokens (`dppo_tv` and `dppo_kl`, None: 20)."""
    sapo_positive: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages (`sapo`)."""
    sapo_negative: PositiveFloat = 1.05
    """Temperature of the gate for other advantages (`sapo`)."""
    off_policy_threshold: PositiveFloat | None = None
    """Mean log ratio of sampling and trained policy above which a trace's tokens with a negative
    advantage have no policy loss (DeepSeek-V3.2); None: no threshold."""
    ratio_level: Level = "token"
    """Probability ratio of a token: its own, or the geometric mean over its trace (GSPO)."""
    importance: Literal["truncate", "mask"] | None = None
    """Importance sampling between engine and trainer: weights out of bounds are clamped
    (`truncate`), or their tokens masked (`mask`). None: captured log probabilities are used as
    those of the old policy."""
    importance_level: WeightLevel = "token"
    """Importance weight of a token: its own, or the geometric mean or the product over its trace.
    """
    importance_low: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Lower bound of the importance weight, which is 1 if engine and trainer agree on a token."""
    importance_high: Annotated[float, Meta(ge=1)] = 2.0
    """Upper bound of the importance weight."""
    kl: NonNegativeFloat = 0.0
    """Weight of the KL penalty towards the reference model; 0 turns it off."""
    kl_correction: bool = False
    """Multiply the KL penalty by the token's ratio and importance weight, so that it is also
    unbiased for older tokens."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, which is the mean entropy of the distributions that trained
    tokens are sampled from; 0 turns it off."""
    cross_entropy: NonNegativeFloat = 0.0
    """Weight of the cross entropy, which is the mean negative log likelihood of chosen tokens of an
    update; 0 turns it off. Their traces are computed once more."""
    tool_tokens: bool = True
    """Choose the tokens between a session's answers, such as tool output, for `cross_entropy`."""
    normalisation: Normalisation = "token"
    """Divisor of the summed token losses of an update."""
    constant_length: PositiveInt = 1024
    """Assumed number of tokens per session (`constant` only)."""

    epochs: PositiveInt = 1
    """Passes over the sessions of a step."""

    def __post_init__(self) -> None:
        """Check names, and that options fit together. Raises `ConfigError`."""
        super().__post_init__()
        options = (("loss", LOSSES), ("advantage", ESTIMATORS), ("credit", CREDITS))
        for option, known in options:
            name = getattr(self, option)
            if name not in known and ":" not in name:
                msg = f"{option} is {name!r}, must be one of {', '.join(known)}, or module:function"
                raise ConfigError(msg, option)
        if self.ratio_level == "trace" and self.loss in {"dppo_tv", "dppo_kl", "gmpo"}:
            msg = f"ratio_level is 'trace', but the loss {self.loss!r} has ratios of tokens only"
            raise ConfigError(msg, "ratio_level")
        self._check_credit()

    def _check_credit(self) -> None:
        """Check that rewards of calls are used by what can use them. Raises `ConfigError`."""
        if self.turn_discount is not None and self.credit != "return":
            msg = f"turn_discount is {self.turn_discount}, but credit is {self.credit!r}; only"
            raise ConfigError(f"{msg} 'return' has a discount", "turn_discount")
        below = [f"credit is {self.credit!r}"] if self.credit != "session" else []
        below += [
            f"{kind} is 'penalise'"
            for kind in ("malformed", "truncated", "repeated")
            if getattr(self, kind) == "penalise"
        ]
        if below and ":" in self.advantage:
            msg = f"advantage {self.advantage!r} is computed from rewards of sessions, but"
            raise ConfigError(f"{msg} {below[0]}", "advantage")

    @property
    def needs_reference(self) -> bool:
        """Whether log probabilities of the reference model are computed."""
        return self.kl > 0 or self.kl_reward > 0 or self.reference

    @property
    def needs_whole_traces(self) -> bool:
        """Whether the loss of a token depends on the other tokens of its trace."""
        averaged = self.ratio_level == "trace" or self.off_policy_threshold is not None
        return averaged or self.loss == "gmpo" or ":" in self.loss
