"""Memory of a trainer's GPU at the peak of an update, by closed formulas.

Symbols: ``T`` tokens of a pass, ``w`` ranks that share the weights, ``h`` hidden size, ``f`` width
of the feed-forward network, ``V`` vocabulary; ``c`` bytes of a number in matrix products, ``r`` in
the residual stream, ``g`` of a whole weight and its whole gradient.

- **Kept**: weights, gradients and AdamW's two moments, ``16 / w`` bytes per trained weight.
- **Whole**: FSDP2 gathers embeddings and output layer for a whole pass, and up to three layers: the
  current one, the next one, and the buffer of the gathering. The gradient of the output layer is
  whole until the end; that of a layer is copied to float32 to be reduced over the ranks.
- **Inputs**: with checkpointing, the input of each layer is kept: ``r h T``.
- **Layer**: one layer is computed again at a time; `count_layer` adds up what autograd then holds.
  Its backward pass begins with the gradients of its output, ``r h T``, and of two matrices of the
  feed-forward network, ``2 c f T``.
- **Logits** exist for `logits_chunk` tokens at a time, with a second array of float32 for their
  exponentials; their gradient takes the memory of the logits.

`list_moments` has the moments of an update that can be the peak; the largest is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tugline.trainers.plan.shape import Layer, ModelShape

FLOAT32 = 4
_MOMENTS = 2
_LOGITS_ARRAYS = 2
_GATHERED_LAYERS = 3
_CHUNK = 64
"""Tokens between two states that the kernels of a gated delta net store."""


class Precision(NamedTuple):
    """Bytes of numbers."""

    frozen: int
    """Of a weight below an adapter."""
    whole: int
    """Of a weight that is gathered from its shards, and of its whole gradient."""
    compute: int
    """In matrix products and attention."""
    residual: int
    """In the stream between layers."""
    casts: bool = False
    """Whether autocast makes a copy of the input for each matrix product."""


def choose_precision(*, compute: str | None, sharded: bool, lora: bool) -> Precision:
    """Return the precision of a run that computes in the type `compute`; None: float32.

    Sharded weights are gathered in that type and the stream has it (`MixedPrecisionPolicy`); else
    autocast chooses it for matrix products alone. Weights below an adapter have it.
    """
    if compute != "bfloat16":
        return Precision(frozen=4, whole=4, compute=4, residual=4)
    if sharded:
        return Precision(frozen=2, whole=2, compute=2, residual=2)
    if lora:
        return Precision(frozen=2, whole=4, compute=2, residual=2, casts=True)
    return Precision(frozen=4, whole=4, compute=2, residual=4, casts=True)


class Pass(NamedTuple):
    """A forward pass and its backward pass."""

    tokens: int
    chunk: int
    """Tokens whose logits are in memory at the same time."""
    checkpointing: bool
    offload: bool
    """Whether inputs of layers wait in host memory."""
    alone: bool
    """Whether it is the only pass of its update, so that gradients do not exist before it."""
    foreach: bool
    """Whether AdamW works on all weights at once, with another number for each, as on a GPU; else
    on one weight after the other, with two."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one GPU at the peak of an update."""

    weights: int
    gradients: int
    optimizer: int
    whole: int
    """Gathered weights, and gradients that are not yet reduced."""
    inputs: int
    """Inputs of layers."""
    layer: int
    """Activations and their gradients."""
    logits: int
    host: int
    """Host memory of the inputs; not part of the total."""
    moment: str
    """Part of the update with the peak."""

    @property
    def total(self) -> int:
        """Sum of the parts on the GPU."""
        kept = self.weights + self.gradients + self.optimizer + self.whole
        return kept + self.inputs + self.layer + self.logits


def estimate_memory(shape: ModelShape, precision: Precision, ranks: int, forward: Pass) -> Memory:
    """Return the memory of a GPU. `ranks` share the weights; 1: they are whole on each GPU."""
    frozen = shape.weights if shape.adapted else 0
    kept = {
        "weights": (frozen * precision.frozen + shape.trained * FLOAT32) // ranks,
        "optimizer": _MOMENTS * shape.trained * FLOAT32 // ranks,
        "host": 0,
    }
    if forward.offload:
        kept["host"] = _count_host(shape, precision) * forward.tokens
    empty = dict.fromkeys(("gradients", "whole", "inputs", "layer", "logits"), 0)
    peak = max(
        list_moments(shape, precision, ranks, forward), key=lambda moment: sum(moment[1].values())
    )
    return Memory(**kept, **empty | peak[1], moment=peak[0])


def list_moments(
    shape: ModelShape, p: Precision, ranks: int, forward: Pass
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the moments of an update that can be its peak, with the bytes of each part."""
    sharded = ranks > 1
    count = len(shape.layers)
    all_gradients = shape.trained * FLOAT32 // ranks
    of_root = shape.root_trained * FLOAT32 // ranks
    of_layer = max(layer.trained for layer in shape.layers) * FLOAT32
    before = 0 if forward.alone else all_gradients
    inner = all_gradients - of_root - of_layer // ranks if forward.alone else all_gradients
    root = shape.root * p.whole if sharded else 0
    layer = max(layer.stored for layer in shape.layers) * p.whole if sharded else 0
    gathered = min(_GATHERED_LAYERS, count + 1) * layer
    reduced = of_layer if sharded else 0
    head = 0 if shape.adapted else shape.head * p.whole
    input_bytes = p.residual * shape.hidden * forward.tokens
    states = max(count_layer(layer, shape, p) for layer in shape.layers) * forward.tokens
    working = max(count_working(layer, shape, p) for layer in shape.layers) * forward.tokens

    def hold(layers: int) -> dict[str, int]:
        """Return the activations from which the backward pass of so many layers begins."""
        kept = 1 if forward.offload else layers
        computed = 1 if forward.checkpointing else layers
        return {"inputs": kept * input_bytes, "layer": computed * states + working}

    yield "last layer", hold(count) | {"gradients": before, "whole": root + gathered + head}
    if count > 2:
        whole = root + gathered + head + reduced
        yield "inner layer", hold(count - 1) | {"gradients": before, "whole": whole}
    if count > 1:
        whole = root + layer + head + reduced
        yield "first layer", hold(1) | {"gradients": inner, "whole": whole}
    saved = 0 if forward.checkpointing else count * states
    yield (
        "logits",
        {
            "gradients": before,
            "whole": root + layer,
            "inputs": 0 if forward.offload else count * input_bytes,
            "layer": saved + _count_last_states(shape, p, forward) * forward.tokens,
            "logits": _count_logits(shape, p, forward),
        },
    )
    rest = all_gradients - of_root if forward.alone else all_gradients
    yield "embeddings", {"gradients": rest, "whole": _count_root(shape, p, sharded=sharded)}
    largest = 0 if shape.adapted else shape.head * FLOAT32 // ranks
    temporary = all_gradients if forward.foreach else 2 * largest
    yield "optimizer", {"gradients": all_gradients, "whole": temporary}


# --------------------------------------------------------------------------- root
def _count_root(shape: ModelShape, p: Precision, *, sharded: bool) -> int:
    """Bytes of embeddings and output layer at the end of the backward pass.

    First with their whole gradients, two parts and their sum if both are one weight. Then the
    weights are sharded again, and the gradients copied to float32 to be reduced.
    """
    if shape.adapted:
        return shape.root * p.whole if sharded else 0
    gradients = 3 * shape.head if shape.tied else shape.root
    if not sharded:
        return gradients * FLOAT32
    return max((shape.root + gradients) * p.whole, shape.root * (p.whole + FLOAT32))


def _count_last_states(shape: ModelShape, p: Precision, forward: Pass) -> int:
    """Bytes per token of the last norm, the states of trained tokens, and their gradients."""
    norm = p.compute * shape.hidden if forward.offload else _count_norm(shape, p)
    return norm + 2 * p.compute * shape.hidden


def _count_host(shape: ModelShape, p: Precision) -> int:
    """Bytes per token in host memory: the inputs of layers, and what the last norm holds.

    Its input in float32 is there twice, because it is used twice.
    """
    inputs = len(shape.layers) * p.residual * shape.hidden
    return inputs + 2 * FLOAT32 * shape.hidden + _count_normalized(shape, p)


def _count_normalized(shape: ModelShape, p: Precision) -> int:
    """Bytes per token of the values that a norm multiplies by its weight, if that is trained."""
    if shape.adapted:
        return 0
    return shape.hidden * (FLOAT32 if shape.wide_norms else p.residual)


def _count_logits(shape: ModelShape, p: Precision, forward: Pass) -> int:
    """Bytes of the logits of a chunk and of the gradient of the output layer."""
    chunk = min(forward.chunk, forward.tokens) * shape.vocabulary
    arrays = _LOGITS_ARRAYS * FLOAT32 * chunk
    if shape.adapted:
        return arrays
    head = shape.head * p.whole
    return max(head + arrays, 3 * head + p.compute * chunk)


# --------------------------------------------------------------------------- layers
def count_layer(layer: Layer, shape: ModelShape, p: Precision) -> int:
    """Bytes per token that autograd holds of one layer, besides its input."""
    attends = layer.queries > 0
    states = _count_attention(layer, shape, p) if attends else _count_delta_net(layer, shape, p)
    first = _count_norm(shape, p, products=3 if attends else 4)
    second = _count_norm(shape, p, products=2)
    if p.residual == FLOAT32:
        second += FLOAT32 * shape.hidden  # the input of the second norm, in no other layer
    copies = 0
    if p.casts and shape.adapted:  # of the inputs of the output projection and of the last product
        width = layer.feed_forward * max(1, layer.experts)
        copies = p.compute * (layer.queries + layer.linear_values + width)
    return first + states + second + _count_feed_forward(layer, shape, p) + copies


def count_working(layer: Layer, shape: ModelShape, p: Precision) -> int:
    """Bytes per token of gradients at the start of a layer's backward pass.

    The states before trained tokens, and their gradient, are held until the end of the pass.
    """
    width = layer.feed_forward * max(1, layer.experts)
    return (p.residual + 2 * p.compute) * shape.hidden + 2 * p.compute * width


def _count_norm(shape: ModelShape, p: Precision, products: int = 1) -> int:
    """Bytes of a norm before so many matrix products.

    It holds its input in float32, the normalized values unless its weight is frozen, and its
    output, which the products share unless autocast makes a copy for each.
    """
    h = shape.hidden
    wide = 0 if p.residual == FLOAT32 else FLOAT32 * h
    copies = products + shape.adapted if p.casts else 1
    return wide + _count_normalized(shape, p) + p.compute * h * copies


def _count_feed_forward(layer: Layer, shape: ModelShape, p: Precision) -> int:
    """Bytes of the gate, its activation, the values and their product.

    Experts also hold their inputs, their outputs, and these with their weights.
    """
    width = layer.feed_forward * max(1, layer.experts)
    return p.compute * (4 * width + 3 * layer.experts * shape.hidden)


def _count_attention(layer: Layer, shape: ModelShape, p: Precision) -> int:
    """Bytes of queries, keys, values and output of flash attention.

    Norms of queries and keys hold two more arrays, of which the first is float32.
    """
    q = layer.queries
    k = layer.keys
    states = p.compute * (2 * q + 2 * k)
    if layer.normalized:
        second = FLOAT32 if shape.wide_norms else p.compute
        states += (FLOAT32 + (0 if shape.adapted else second)) * (q + k)
    if layer.gated:
        states += 2 * p.compute * q
    return states


def _count_delta_net(layer: Layer, shape: ModelShape, p: Precision) -> int:
    """Bytes of a gated delta net with the kernel of flash-linear-attention.

    The convolution holds its input and its output before the activation. The kernel holds
    normalized queries and keys, the values, and a row of 64 numbers per head. The gated norm of
    transformers works in float32.
    """
    k = layer.linear_keys
    v = layer.linear_values
    c = p.compute
    convolution = 2 * c * (2 * k + v)
    kernel = c * (2 * k + v + _CHUNK * layer.linear_heads)
    gates = (5 * FLOAT32 + c) * layer.linear_heads
    norm = 3 * FLOAT32 * v + c * v * (2 if shape.adapted else 3)
    return convolution + kernel + gates + norm
