"""Wire formats of inference engines: requests and replies."""

from tugline.chat.engines.base import EngineFormat
from tugline.chat.engines.chat import ObservedChat, TextChat, VllmChat
from tugline.chat.engines.generate import Embedded, VllmCompletions, VllmGenerate
from tugline.chat.engines.sglang import SglangChat, SglangGenerate

ROUTES: dict[str, dict[str, type[EngineFormat]]] = {
    "embedded": {"generate": Embedded},
    "vllm": {
        "generate": VllmGenerate,
        "completions": VllmCompletions,
        "chat": VllmChat,
        "text": TextChat,
    },
    "sglang": {"generate": SglangGenerate, "chat": SglangChat, "text": TextChat},
    "openai": {"chat": ObservedChat, "text": TextChat},
}
"""Routes by kind of engine, best first."""
