"""Gated delta net layers (Qwen3-Next, Qwen3.5) over a tree of traces.

Such a layer has a state after each token: the recurrent state, and the last inputs of its
convolution. A branch of the tree starts from the states at the end of its parent, so a shared
prefix is computed once. Gradients flow through the states. The layer's own ``forward`` computes
each branch, with a cache that holds the states; transformers' caches write into their tensors,
which autograd does not allow.
"""

from collections import Counter
from typing import Any

import torch

from tugline.trainers.grpo.batch import TreePaths

_KIND = "GatedDeltaNet"
"""End of the class names of the supported layers."""


class _States:
    """The states of a layer at the end of a branch, with the interface of a cache."""

    def __init__(self, parent: "_States | None" = None) -> None:
        self.inputs: dict[int, torch.Tensor] = dict(parent.inputs) if parent else {}
        self.recurrent: dict[int, torch.Tensor] = dict(parent.recurrent) if parent else {}

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.inputs.get(state_idx)

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent.get(state_idx)

    def is_recording_past(self, _layer: int) -> bool:
        """Return True, so that a single token does not change the states in place."""
        return True

    def update_conv_state(
        self, inputs: torch.Tensor, _layer: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> torch.Tensor:
        """Return the inputs after the last ones before them; inputs have shape ``(1, dim, n)``."""
        before = self.inputs.get(state_idx)
        if before is None:
            before = inputs.new_zeros(*inputs.shape[:2], conv_kernel_size)
        joined = torch.cat([before, inputs], 2)
        self.inputs[state_idx] = joined[..., -before.shape[2] :]
        return joined

    def update_recurrent_state(
        self, state: torch.Tensor, _layer: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.recurrent[state_idx] = state
        return state


class _TreeLayer(torch.nn.Module):
    """Mixed into the class of a layer: computes a tree if the pass has one."""

    def forward(
        self, hidden_states: torch.Tensor, *, tree_paths: TreePaths | None = None, **kwargs: Any
    ) -> torch.Tensor:
        compute: Any = super().forward
        if tree_paths is None:
            whole: torch.Tensor = compute(hidden_states=hidden_states, **kwargs)
            return whole
        kwargs |= {"attention_mask": None}  # a tree has no padding
        children = Counter(branch.parent for branch in tree_paths.branches)
        ends: dict[int, _States] = {}
        parts = []
        for number, (begin, end, parent) in enumerate(tree_paths.branches):
            states = _States(ends.get(parent))
            parts.append(
                compute(hidden_states=hidden_states[:, begin:end], **kwargs | {"cache": states})
            )
            if children[number]:
                ends[number] = states
            children[parent] -= 1
            if not children[parent]:
                ends.pop(parent, None)
        return torch.cat(parts, 1)


def use_tree_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Make the gated delta net layers of a model compute trees, and return them."""
    layers = [each for each in model.modules() if type(each).__name__.endswith(_KIND)]
    for layer in layers:
        if not isinstance(layer, _TreeLayer):
            kind = type(layer)
            layer.__class__ = type(f"Tree{kind.__name__}", (_TreeLayer, kind), {})
    return layers


def restore_layers(layers: list[torch.nn.Module]) -> None:
    """Undo `use_tree_layers`."""
    for layer in layers:
        layer.__class__ = type(layer).__bases__[1]
