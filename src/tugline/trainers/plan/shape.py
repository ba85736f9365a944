"""Sizes of a model, read from its ``config.json``; weights are not needed.

The model is built on the meta device, where tensors have a shape but no memory, with the adapter of
the run if there is one. Its parameters are counted there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from tugline.errors import ConfigError
from tugline.trainers.config import Lora
from tugline.trainers.grpo.forward import count_operations, find_used_share
from tugline.trainers.grpo.packing import Costs
from tugline.trainers.lora import add_adapter


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder layer. Widths are numbers per token."""

    weights: int
    """Parameters without adapters."""
    trained: int
    """Parameters that training changes."""
    feed_forward: int
    """Width inside the feed-forward network; of one expert if there are experts."""
    experts: int = 0
    """Experts per token; 0: a dense feed-forward network."""
    active: int
    """Parameters that a token uses; fewer than `weights` if there are experts."""
    queries: int = 0
    """Width of the queries; 0 for a gated delta net."""
    keys: int = 0
    """Width of the keys, and of the values."""
    normalized: bool = False
    """Whether queries and keys are normalized."""
    gated: bool = False
    """Whether the output of the attention is multiplied by a gate."""
    linear_keys: int = 0
    """Width of the keys of a gated delta net; 0 for full attention."""
    linear_values: int = 0
    linear_heads: int = 0
    """Number of value heads of a gated delta net."""
    linear_head_keys: int = 0
    """Width of a key head."""

    @property
    def stored(self) -> int:
        """Parameters with adapters."""
        return self.weights + (self.trained if self.trained < self.weights else 0)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A causal language model."""

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    root: int
    """Parameters outside of the layers: embeddings, last norm and output layer; tied weights count
    once."""
    root_trained: int
    tied: bool
    """Whether the output layer has the weights of the embeddings."""
    wide_norms: bool
    """Whether norms multiply by their weight in float32."""
    window: int
    """Largest context of the model, in tokens."""
    costs: Costs
    """Floating-point operations of a forward pass."""

    @property
    def weights(self) -> int:
        """Parameters without adapters."""
        return self.root + sum(layer.weights for layer in self.layers)

    @property
    def trained(self) -> int:
        """Parameters that training changes."""
        return self.root_trained + sum(layer.trained for layer in self.layers)

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained, and the weights are frozen."""
        return self.root_trained == 0

    @property
    def head(self) -> int:
        """Parameters of the output layer."""
        return self.hidden * self.vocabulary


def read_shape(folder: Path, lora: Lora | None = None) -> ModelShape:
    """Return the shape of the model in `folder`, of which only ``config.json`` is read.

    Raises `ConfigError`.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        msg = f"model: {folder} has no readable config.json of a Hugging Face model: {reason}"
        raise ConfigError(msg, "model") from error
    return measure_shape(config, folder.name, lora)


def measure_shape(config: Any, name: str, lora: Lora | None = None) -> ModelShape:
    """Return the shape of a model with a configuration of transformers. Raises `ConfigError`."""
    try:
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:
        msg = f"model: {name} is no causal language model: {str(error).splitlines()[0]}"
        raise ConfigError(msg, "model") from error
    costs = count_operations(model)
    if lora is not None:
        add_adapter(model, lora, 0)  # changes the model in place
    text = config.get_text_config()
    layers = model.base_model.layers
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [each for each in model.parameters() if id(each) not in inside]
    return ModelShape(
        name=name,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        layers=tuple(_measure_layer(layer, text) for layer in layers),
        root=sum(each.numel() for each in outside),
        root_trained=sum(each.numel() for each in outside if each.requires_grad),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        wide_norms=type(layers[0].input_layernorm).__name__.startswith(_WIDE_NORMS),
        window=text.max_position_embeddings,
        costs=costs,
    )


def _measure_layer(layer: torch.nn.Module, text: Any) -> Layer:
    named = dict(layer.named_parameters())
    weights = sum(each.numel() for name, each in named.items() if ".lora_" not in name)
    experts = 0
    width: int = text.intermediate_size
    active = weights
    fused = [each for name, each in named.items() if ".experts." in name and ".lora_" not in name]
    if fused:
        experts = text.num_experts_per_tok
        width = text.moe_intermediate_size
        total = sum(each.numel() for each in fused)
        active = weights - int(total * (1 - find_used_share(text)))
    sizes: dict[str, Any] = {}
    if _has(named, "linear_attn."):
        sizes = {
            "linear_keys": text.linear_num_key_heads * text.linear_key_head_dim,
            "linear_values": text.linear_num_value_heads * text.linear_value_head_dim,
            "linear_heads": text.linear_num_value_heads,
            "linear_head_keys": text.linear_key_head_dim,
        }
    else:
        heads = text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        rows = sum(p.shape[0] for n, p in named.items() if n.endswith(_Q_PROJ))
        sizes = {
            "queries": heads * dim,
            "keys": (getattr(text, "num_key_value_heads", None) or heads) * dim,
            "normalized": _has(named, "q_norm."),
            "gated": rows == 2 * heads * dim,
        }
    return Layer(
        weights=weights,
        trained=sum(each.numel() for each in named.values() if each.requires_grad),
        feed_forward=width,
        experts=experts,
        active=active,
        **sizes,
    )


_WIDE_NORMS = ("Gemma", "Qwen3Next", "Qwen3_5")
_Q_PROJ = ("q_proj.weight", "q_proj.base_layer.weight")


def _has(names: Sequence[str] | dict[str, Any], part: str) -> bool:
    return any(part in name for name in names)
