"""KV cache of running rows and of finished sequences, and the search for shared prefixes.

The pool is one tensor ``(layer, key|value, row, head, position, dim)``. Running rows are contiguous
from row 0, so a decode step is one batch over a view, without gathering. A finished sequence is
copied at its exact length and parked; a new request copies the longest prefix that it shares with
any running or parked row.

A gated delta net has no keys and values but a state after its last token, which cannot be cut. Such
states are kept beside the KV: those of a running row at its end, those of a copy at its end.

Invariant I1: only KV of the current weights is matched. `PrefixTable` entries are removed when the
weights change, because a stale prefix silently gives log probabilities that are wrong by nats.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tugline.errors import UsageError
from tugline.types import Ids


class Cut(NamedTuple):
    """A copy of a row."""

    kv: torch.Tensor
    states: tuple[torch.Tensor, ...]
    """States after its last position, if the model has any."""


class KVPool(Cache):
    """The cache that the model writes to; `aim` sets the target of its next forward pass."""

    def __init__(
        self,
        *,
        layers: Sequence[int],
        heads: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype,
        states: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        """`layers` are the numbers of the layers with KV of `heads` and `dim`.

        `states` has the states of a row in each other layer: the inputs of its convolution, and the
        recurrent state, of shape ``(1, ...)``.
        """
        super().__init__(layers=[])
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._data = torch.zeros(len(layers), 2, 1, heads, 2, dim, device=device, dtype=dtype)
        self._states = {
            layer: [torch.zeros_like(each) for each in pair]
            for layer, pair in (states or {}).items()
        }
        self._first = self._count = self._length = 0
        self._rows = self._positions = torch.empty(0)

    @property
    def recurrent(self) -> bool:
        """Whether a row has states, so that only the whole of a copy can be continued."""
        return bool(self._states)

    @property
    def scratch(self) -> int:
        """A position that no row ever reads; padding is written there."""
        return self._data.shape[4] - 1

    def ensure(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; a growing dimension at least doubles."""
        layers, _, had_rows, heads, had_length, dim = self._data.shape
        if rows <= had_rows and length < had_length:
            return
        new_rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
        new_length = had_length if length < had_length else max(length + 1, 2 * had_length)
        old = self._data
        self._data = old.new_zeros(layers, 2, new_rows, heads, new_length, dim)
        self._data[:, :, :had_rows, :, :had_length] = old
        for pair in self._states.values():
            for number, state in enumerate(pair):
                pair[number] = state.new_zeros(new_rows, *state.shape[1:])
                pair[number][:had_rows] = state

    def aim(self, first: int, positions: torch.Tensor, length: int) -> None:
        """Select rows from `first`: write at `positions` (rows, tokens), read up to `length`."""
        self._first = first
        self._count = positions.shape[0]
        self._length = length
        self._rows = torch.arange(self._count, device=positions.device)[:, None]
        self._positions = positions

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store states ``(rows, head, tokens, dim)``; return views of the readable positions."""
        rows = self._data[self._places[layer_idx], :, self._first : self._first + self._count]
        keys, values = rows[0], rows[1]
        keys[self._rows, :, self._positions] = key_states.transpose(1, 2)
        values[self._rows, :, self._positions] = value_states.transpose(1, 2)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of readable positions, which some models request."""
        return self._length

    # ----------------------------------------------------------------- states
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the last inputs of a layer's convolution, as a view that may be written."""
        return self._aimed(layer_idx, 0)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Return the recurrent states of a layer."""
        return self._aimed(layer_idx, 1)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no earlier states are kept."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Store the last inputs ``(rows, dim, tokens)``; return them after the earlier ones."""
        state = self._aimed(layer_idx, 0)
        joined = torch.cat([state, conv_states], 2)
        state.copy_(joined[:, :, -state.shape[2] :])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Store the recurrent states."""
        return self._aimed(layer_idx, 1).copy_(recurrent_states)

    def _aimed(self, layer: int, number: int) -> torch.Tensor:
        return self._states[layer][number][self._first : self._first + self._count]

    def _all_states(self) -> list[torch.Tensor]:
        return [state for pair in self._states.values() for state in pair]

    # ----------------------------------------------------------------- rows
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions, and the states, of one row to another."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]
        for state in self._all_states():
            state[target] = state[source]

    def clear(self, row: int) -> None:
        """Reset the states of a row to those before its first token."""
        for state in self._all_states():
            state[row] = 0

    def cut(self, row: int, length: int) -> Cut:
        """Return a copy of the first `length` positions of a row, and of its states."""
        states = tuple(state[row].clone() for state in self._all_states())
        return Cut(self._data[:, :, row, :, :length].clone(), states)

    def paste(self, copy: Cut, row: int, length: int) -> None:
        """Write the first `length` positions of a copy, and its states, into a row."""
        self._data[:, :, row, :, :length] = copy.kv[:, :, :, :length]
        for state, copied in zip(self._all_states(), copy.states, strict=True):
            state[row] = copied


class PrefixTable:
    """Token ids of rows, all compared with a prompt in one vector operation."""

    def __init__(self, rows: int, length: int) -> None:
        self._ids = np.zeros((rows, length), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        """Number of leading ids of a row with usable KV; 0 excludes it from matches."""

    def put(self, row: int, ids: Ids) -> None:
        """Set the ids of `row`."""
        self._ids[row, : len(ids)] = ids
        self._lengths[row] = len(ids)

    def extend(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """Append a token to each of `rows`."""
        self._ids[rows, self._lengths[rows]] = tokens
        self._lengths[rows] += 1

    def move(self, source: int, target: int) -> None:
        """Copy the ids of `source` to `target`."""
        self.put(target, self._ids[source, : self._lengths[source]])

    def forget(self, row: int | slice) -> None:
        """Exclude `row` from matches."""
        self._lengths[row] = 0

    def longest(self, ids: Ids, *, whole: bool = False) -> tuple[int, int]:
        """Return the row with the longest common prefix with `ids`, and the prefix length.

        With `whole`, only rows that are a prefix of `ids` count.
        """
        width = min(len(ids), int(self._lengths.max(initial=0)))
        if not width:
            return 0, 0
        differs = self._ids[:, :width] != ids[:width]
        shared = np.where(differs.any(1), differs.argmax(1), width)
        shared = np.minimum(shared, self._lengths)
        if whole:
            shared = np.where((shared == self._lengths) & (self._lengths <= width), shared, 0)
        row = int(shared.argmax())
        return row, int(shared[row])

    def length(self, row: int) -> int:
        """Return the number of tokens in `row`."""
        return int(self._lengths[row])


def make_pool(model: PreTrainedModel) -> KVPool:
    """Return a pool with the shape of the model's own cache. Raises `UsageError` if unsupported."""
    with torch.inference_mode():
        probe = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device))
    layers = dict(enumerate(getattr(getattr(probe, "cache", None), "layers", ())))
    full = [number for number, layer in layers.items() if type(layer).__name__ == "DynamicLayer"]
    states = _find_states(model, layers)
    shapes = {
        tuple(tensor.shape[1::2])
        for number in full
        for tensor in (layers[number].keys, layers[number].values)
    }
    if {*full, *states} != {*layers} or len(shapes) != 1:
        kinds = sorted({type(layer).__name__ for layer in layers.values()})
        raise UsageError(
            f"model type {model.config.model_type!r} caches {', '.join(kinds) or 'nothing'}"
            f" of {len(shapes)} shapes; the embedded engine serves models whose layers all have"
            " full attention of one shape (Qwen2, Qwen3, Llama...), or are gated delta nets beside"
            " it (Qwen3-Next, Qwen3.5): serve this model with vLLM"
        )
    try:
        model.set_attn_implementation("sdpa")
    except ValueError as error:
        msg = f"model type {model.config.model_type!r} has no sdpa attention: serve it with vLLM"
        raise UsageError(msg) from error
    heads, dim = shapes.pop()
    return KVPool(
        layers=full, heads=heads, dim=dim, device=model.device, dtype=model.dtype, states=states
    )


def _find_states(
    model: PreTrainedModel, layers: Mapping[int, Any]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the states of each gated delta net by its number, from a cache."""
    nets = [each for each in model.modules() if type(each).__name__.endswith("GatedDeltaNet")]
    numbers = {int(net.layer_idx) for net in nets if isinstance(net.layer_idx, int)}
    return {
        number: (layers[number].conv_states[0], layers[number].recurrent_states[0])
        for number in sorted(numbers & {*layers})
        if len(layers[number].conv_states) == 1
    }
