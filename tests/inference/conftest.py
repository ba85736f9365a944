"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest
from transformers import Qwen3ForCausalLM

from inference.tiny_model import tiny


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    """Fresh weights for each test, since a test may swap them."""
    return tiny()
