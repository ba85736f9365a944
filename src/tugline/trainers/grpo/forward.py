"""Log probabilities of trained tokens under a Hugging Face causal language model.

The output layer is applied only where the next token is trained, and to a few tokens at a time:
logits over the vocabulary for every token would cost more than all layers below. The model may be
wrapped (PEFT, DDP) or sharded in place (FSDP2). The experts and the sets of ids in a `MicroBatch`
are those of the engine: routers take these experts, and a token's probability is that in its set.

Trees of traces are computed by the attention of `tugline.trainers.grpo.attention`, which is
selected in the model's config, and by the layers of `tugline.trainers.grpo.recurrence`.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from msgspec.structs import replace
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tugline.errors import ConfigError
from tugline.trainers.grpo.attention import TREE_ATTENTION
from tugline.trainers.grpo.batch import MicroBatch, Row, collate, plain_sample
from tugline.trainers.grpo.config import UpdateConfig
from tugline.trainers.grpo.logits import TargetLogprobs, TargetScores
from tugline.trainers.grpo.packing import Costs
from tugline.trainers.grpo.recurrence import restore_layers, use_tree_layers
from tugline.trainers.grpo.routes import Routes, check_routers
from tugline.types import Ids, Kept, Sample

FORWARD = "tugline_forward"
"""Name of the method added to an FSDP2 module, which gathers parameters as ``forward`` does."""
TokenLoss = Callable[[torch.Tensor, slice], torch.Tensor]
"""Returns the losses of consecutive trained tokens, of their log probabilities and their range."""

_PROBE = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 6, 7, 8))
"""Rows with a common prefix, of ids that every model has."""

_LARGE = 500_000_000
"""Weights of a model whose layers are recomputed in the backward pass by default."""
_RANDOM = ("dropout", "layerdrop", "jitter")
"""Parts of the names of numeric attributes that make a model random in training mode."""


class PolicyModel:
    """A causal language model as a distribution over next tokens.

    The model is put in training mode, which activation checkpointing needs, with every dropout
    set to 0: otherwise the trained policy would differ from the sampling policy.
    """

    def __init__(self, model: torch.nn.Module, config: UpdateConfig) -> None:
        self.model = model
        self._chunk = config.logits_chunk
        self._offloads = config.offload_activations
        root: Any = model.module if isinstance(model, DistributedDataParallel) else model
        inner = root.get_base_model() if hasattr(root, "get_base_model") else root
        self._root = root
        self._body = inner.base_model
        self._head = inner.get_output_embeddings()
        self._run = self._call
        self._sharded = isinstance(root, FSDPModule)
        self._compute_type = get_compute_type(config)
        """A sharded model computes in this type by itself, see `distributed.shard`."""
        if self._sharded:
            setattr(root, FORWARD, self._run)
            register_fsdp_forward_method(root, FORWARD)
            self._run = getattr(root, FORWARD)
        self.routes = Routes(inner, balanced=config.load_balancing > 0)
        self.costs = count_operations(inner)
        disable_dropout(model.train())
        self._check_head()
        if config.load_balancing > 0:
            check_routers(self.routes, type(inner).__name__, "load_balancing", "0")
        in_trees, self.packing = self._choose_packing(inner, config)
        """Sentence that says how traces are packed, and why."""
        self.config = replace(config, tree_packing=in_trees)
        """Settings with the decision on `tree_packing`."""
        if recomputes_layers(config, _count_weights(inner)):
            _checkpoint_layers(inner)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Return the natural log probabilities of the trained tokens, float32, shape ``(N,)``.

        The logits that predict a token are divided by its temperature. With gradient, experts are
        replayed until the next pass, so that there may be a backward pass.
        """
        logprobs: torch.Tensor
        logprobs, _ = self._run(self._compute, micro, False)
        self._reshard()
        if not torch.is_grad_enabled():
            self.routes.replay(None)
        return logprobs

    def backward(
        self,
        micro: MicroBatch,
        loss: TokenLoss,
        *,
        whole: bool = False,
        bonus: TokenLoss | None = None,
        further: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Accumulate the gradient of a sum of token losses; return what `logprobs` returns.

        The loss of a token must not depend on the log probabilities of others. Then the gradient of
        a chunk of logits is computed at once, so they are neither stored nor computed again. If it
        does, `whole` computes all at once. `bonus` returns further losses of the entropies of the
        tokens' distributions, `further` one more loss of the same pass.
        """
        gradient: torch.Tensor | None = None
        if whole:
            logprobs: torch.Tensor
            logprobs, entropy = self._run(self._compute, micro, bonus is not None)
            root = loss(logprobs, slice(None)).sum()
            if bonus is not None:
                root = root + bonus(entropy, slice(None)).sum()
        else:
            root, gradient, logprobs = self._run(self._backward_head, micro, loss, bonus)
        if further is None:
            torch.autograd.backward(root, gradient)
        else:
            torch.autograd.backward((root, further()), (gradient, None))
        self.routes.replay(None)
        return logprobs.detach()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def _compute(self, micro: MicroBatch, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001 - called by `_run`
        """Return the log probabilities, and the entropies, which are empty unless asked for."""
        states = self._select_states(micro)
        with self._precision():
            parts = [
                # the logits of a chunk are recomputed in the backward pass, not stored
                checkpoint(
                    self._score,
                    states[tokens],
                    micro.target[tokens],
                    micro.temperature[tokens],
                    micro.get_kept(tokens),
                    entropy=entropy,
                    use_reentrant=False,
                )
                for tokens in self._chunks(micro)
            ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _backward_head(
        self, micro: MicroBatch, loss: TokenLoss, bonus: TokenLoss | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the states of trained tokens, their gradient, and the log probabilities."""
        states = self._select_states(micro)
        gradients = list[torch.Tensor]()
        parts = []
        for tokens in self._chunks(micro):
            leaf = states[tokens].detach().requires_grad_()
            kept = micro.get_kept(tokens)
            with self._precision():
                new, entropy = self._score(
                    leaf,
                    micro.target[tokens],
                    micro.temperature[tokens],
                    kept,
                    entropy=bonus is not None,
                )
            total = loss(new, tokens).sum()
            if bonus is not None:
                total = total + bonus(entropy, tokens).sum()
            torch.autograd.backward(total)
            assert leaf.grad is not None  # noqa: S101 - it requires one
            gradients.append(leaf.grad)
            parts.append(new.detach())
        return states, torch.cat(gradients), torch.cat(parts)

    def _select_states(self, micro: MicroBatch) -> torch.Tensor:
        """Return the last hidden state before each trained token, shape ``(N, hidden)``."""
        with self._precision():
            return self._states(micro).flatten(0, 1)[micro.source]

    def _chunks(self, micro: MicroBatch) -> list[slice]:
        count = max(1, len(micro.target))
        return [slice(at, at + self._chunk) for at in range(0, count, self._chunk)]

    def _precision(self) -> torch.autocast:
        enabled = self._compute_type is not None and not self._sharded
        return torch.autocast(self.device.type, self._compute_type, enabled=enabled)

    def _states(self, micro: MicroBatch) -> torch.Tensor:
        """Return the last hidden states of the pass's ids, shape ``(B, L, hidden)``."""
        ids = micro.ids
        self.routes.replay(micro.experts)
        tree = dict[str, Any]()
        if micro.paths is not None:
            # a mask with four dimensions keeps transformers from making one; paths replace it
            unused = torch.zeros(1, 1, 1, 1, device=ids.device)
            tree = {"position_ids": micro.positions, "attention_mask": unused}
            tree["tree_paths"] = micro.paths
        with self._saving():
            output = self._body(input_ids=ids, use_cache=False, **tree)
        states: torch.Tensor = output.last_hidden_state
        return states

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which layers, which are checkpointed, save their inputs."""
        if not self._offloads:
            return contextlib.nullcontext()
        return save_on_cpu(pin_memory=self.device.type != "cpu")

    def _score(
        self,
        states: torch.Tensor,
        target: torch.Tensor,
        temperature: torch.Tensor,
        kept: Kept | None,
        *,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if entropy:
            both = TargetScores.apply(logits, target, temperature, kept)  # type: ignore[no-untyped-call]
            return cast("tuple[torch.Tensor, torch.Tensor]", both)
        chosen = TargetLogprobs.apply(logits, target, temperature, kept)  # type: ignore[no-untyped-call]
        return chosen, logits.new_empty(0)

    def _reshard(self) -> None:
        """Reshard parameters, which FSDP2 leaves gathered after a pass without gradient."""
        if self._sharded and not torch.is_grad_enabled():
            self._root.reshard()

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator["PolicyModel"]:
        """Leave the adapter out of forward passes, which gives the model before training."""
        with self._root.disable_adapter():
            yield self

    # ----------------------------------------------------------------- checks of the model
    @torch.no_grad()
    def _probe(self, *, tree: bool) -> torch.Tensor:
        """Return the log probabilities of the ids of two short rows with a common prefix."""
        rows = [Row(make_probe(ids)) for ids in _PROBE]
        return self.logprobs(collate(rows, tree=tree, device=self.device))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Raise `ConfigError` if the model changes its logits after the output layer."""
        ids = torch.tensor(_PROBE, device=self.device)
        with self._precision():
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        whole = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None]).flatten()
        self._reshard()
        if not self._agree(whole, self._probe(tree=False)):
            msg = f"model {type(self.model).__name__} changes its logits after the output layer"
            raise ConfigError(msg)

    def _choose_packing(self, inner: Any, config: UpdateConfig) -> tuple[bool, str]:
        """Set up the model for trees if wanted and supported; return whether, and a reason.

        Raises `ConfigError` if trees are required and not supported.
        """
        if not config.tree_packing:
            return False, "every trace is computed by itself: tree_packing is false"
        problem = self._use_tree(inner)
        if problem is None:
            return True, "prefixes that traces share are computed once"
        why = f"model {type(inner).__name__} {problem}"
        if config.tree_packing != "auto":
            msg = (
                f"tree_packing: {why}; it needs full attention or gated delta nets in every layer. "
                "Set tree_packing to false to compute every trace by itself"
            )
            raise ConfigError(msg, "tree_packing")
        return False, f"every trace is computed by itself: {why}"

    def _use_tree(self, inner: Any) -> str | None:
        """Set the model's layers to trees; return what is not supported, with nothing changed."""
        config = inner.config.get_text_config()
        kinds = Counter(getattr(config, "layer_types", None) or ())
        if getattr(config, "sliding_window", None) and not hasattr(config, "layer_types"):
            kinds = Counter(["sliding_attention"])
        layers = use_tree_layers(inner)
        if kinds["linear_attention"] == len(layers):
            del kinds["linear_attention"]
        del kinds["full_attention"]
        if kinds:
            restore_layers(layers)
            return f"has layers of {', '.join(sorted(kinds))}"
        problem = None
        plain = self._probe(tree=False)
        before = inner.config._attn_implementation  # noqa: SLF001 - no public name
        try:
            inner.set_attn_implementation(TREE_ATTENTION)
            # on an H100, kernels differed by 3e-4 nats in float32 for a model of 135M weights
            within = 5e-3 if self.device.type == "cuda" else 1e-4
            if not self._agree(plain, self._probe(tree=True), within):
                problem = "computes different log probabilities in a tree"
        except (ValueError, TypeError) as error:
            problem = f"does not support tree attention ({error})"
        if problem:
            inner.set_attn_implementation(before)
            restore_layers(layers)
        return problem

    def _agree(self, first: torch.Tensor, other: torch.Tensor, within: float = 1e-4) -> bool:
        types = {parameter.dtype for parameter in self.model.parameters()}
        exact = types == {torch.float32} and self._compute_type in {None, torch.float32}
        return torch.allclose(first.float(), other.float(), rtol=0, atol=within if exact else 5e-2)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of `model` to 0, in modules and in numeric attributes."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # noqa: SLF001 - their base
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(part in name for part in _RANDOM):
                setattr(module, name, 0.0)


def get_compute_type(config: UpdateConfig) -> torch.dtype | None:
    """Return the data type of forward passes; None: that of the weights."""
    return None if config.autocast is None else getattr(torch, config.autocast)


def recomputes_layers(config: UpdateConfig, weights: int) -> bool:
    """Return whether layers of a model with so many weights are computed again (backward pass)."""
    wanted = config.gradient_checkpointing
    if wanted == "auto":
        wanted = weights >= _LARGE
    return wanted or config.offload_activations


def _count_weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _count_experts(inner: torch.nn.Module) -> int:
    """Return the number of weights of routed experts."""
    return sum(w.numel() for name, w in inner.named_parameters() if ".experts." in name)


def find_used_share(config: Any) -> float:
    """Return the share of the routed experts that a token uses; 1 for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return float(config.num_experts_per_tok / count) if count else 1.0


def count_operations(inner: Any) -> Costs:
    """Return the floating-point operations of a transformers model's forward passes."""
    config = inner.config.get_text_config()
    vectors = inner.get_input_embeddings().weight.numel()
    weights = _count_weights(inner.base_model) - vectors
    weights -= int(_count_experts(inner) * (1 - find_used_share(config)))
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Costs(2.0 * weights, 4.0 * heads * width * layers, 2.0 * vectors)


def _checkpoint_layers(inner: Any) -> None:
    try:
        inner.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        msg = f"gradient_checkpointing: {error}; set it to false"
        raise ConfigError(msg, "gradient_checkpointing") from error


def make_probe(ids: Sequence[int] | Ids) -> Sample:
    """Return a sample in which every id but the first is trained."""
    return plain_sample(np.array(ids, np.int32), np.arange(len(ids)) > 0)
