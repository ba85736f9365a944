"""A scripted engine for a server in this process."""

from __future__ import annotations

from typing import Any

from support.tokenizer import make_tokenizer
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine


def create_engine(name: str = "scripted") -> Any:
    """The app of an engine that always answers "so be it"."""
    tokens = make_tokenizer()
    answer, end = tokens.encode("so be it"), tokens.encode("<|im_end|>")
    engine = ScriptedEngine(
        lambda _prompt, _request: Reply([*answer, *end], tokens_per_chunk=4),
        vocab_size=tokens.size,
        eos_ids=end,
    )
    return create_app(engine, model_name=name)
