"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3ForCausalLM

from inference.tiny_model import tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models are slower on more threads, and tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    """Fresh weights for each test, since a test may swap them."""
    return tiny()
