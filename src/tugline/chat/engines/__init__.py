"""Formats for requests to inference engines, and their replies."""

from collections.abc import Callable
from typing import NamedTuple

from tugline.chat.engines.base import EngineFormat
from tugline.chat.engines.chat import ObservedChat, TextChat, VllmChat
from tugline.chat.engines.generate import Embedded, VllmCompletions, VllmGenerate
from tugline.chat.engines.sglang import SglangChat, SglangGenerate
from tugline.types import LogprobMeaning, Mode


class EngineRoute(NamedTuple):
    """One way to ask an engine."""

    mode: Mode
    make: Callable[[LogprobMeaning], EngineFormat]
    advice: str
    """What opens the route where it is closed."""


_TEXT = EngineRoute(Mode.TEXT, lambda _: TextChat(), "give it a chat template")
_PARSERS = "start it with --enable-auto-tool-choice --tool-call-parser NAME"
ROUTES: dict[str, dict[str, EngineRoute]] = {
    "embedded": {
        "generate": EngineRoute(Mode.EXACT, lambda _: Embedded(), "this is no engine of ours")
    },
    "vllm": {
        "generate": EngineRoute(Mode.EXACT, VllmGenerate, "start vLLM with --enable-scale-out"),
        "completions": EngineRoute(Mode.EXACT, VllmCompletions, "upgrade to vLLM 0.10.2 or later"),
        "chat": EngineRoute(Mode.OBSERVED, VllmChat, f"{_PARSERS} (and --reasoning-parser)"),
        "text": _TEXT,
    },
    "sglang": {
        "generate": EngineRoute(Mode.EXACT, SglangGenerate, "upgrade SGLang"),
        "chat": EngineRoute(
            Mode.OBSERVED, SglangChat, "start it with --tool-call-parser and --reasoning-parser"
        ),
        "text": _TEXT,
    },
    "openai": {
        "chat": EngineRoute(
            Mode.OBSERVED, ObservedChat, "use an engine that knows `return_token_ids`"
        ),
        "text": _TEXT,
    },
}
"""Routes by kind of engine, the best first."""
