"""An engine without a model, to be served in this process."""

from __future__ import annotations

from typing import Any

from tiny import tokenizer
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine


def create_engine(name: str = "scripted") -> Any:
    """An engine that always says "so be it", to be served."""
    words = tokenizer()
    answer, end = words.encode("so be it"), words.encode("<|im_end|>")
    engine = ScriptedEngine(
        lambda _prompt, _request: Reply([*answer, *end], tokens_per_chunk=4),
        vocab_size=words.size,
        eos_ids=end,
    )
    return create_app(engine, model_name=name)
