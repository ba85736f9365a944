"""The policy that the demo starts from: a model folder that is shipped with the package.

It is made by ``tugline demo --rebuild-warm-start``: an ordinary Hugging Face folder. Weights are
kept in half precision to keep the package small; training and sampling happen in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tugline.chat.tokenizer import Tokenizer
from tugline.inference.load import load

WARM_START = Path(__file__).parent / "warm_start_model"


@dataclass(frozen=True, slots=True)
class Policy:
    """A model in float32, with what is needed to talk to it."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


def load_policy(folder: Path = WARM_START) -> Policy:
    """The policy in `folder`. Raises `UsageError` when it is not a model folder."""
    return Policy(*load(folder, dtype=torch.float32))


def describe(model: torch.nn.Module) -> str:
    """Architecture and size, in words."""
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"{type(model).__name__.removesuffix('ForCausalLM')} architecture, {size:.1f} M parameters"
    )
