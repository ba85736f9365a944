"""Routes of every kind of engine, and the result of probing one."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from tugline.chat.engines.base import EngineFormat
from tugline.chat.engines.chat import ObservedChat, TextChat
from tugline.chat.engines.generate import Embedded
from tugline.chat.engines.sglang import SglangChat, SglangGenerate
from tugline.chat.engines.vllm import VllmChat, VllmCompletions, VllmGenerate
from tugline.errors import UsageError
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
        "generate": EngineRoute(Mode.EXACT, lambda _: Embedded(), "this is no engine of ours"),
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


class CheckOutcome(StrEnum):
    """How a check ended."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    UNKNOWN = "unknown"
    """It could not be determined."""


class ProbeCheck(msgspec.Struct, frozen=True):
    """One thing that was tried."""

    name: str
    outcome: CheckOutcome
    detail: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine supports, and what to change."""

    url: str
    engine: str
    """A key of `ROUTES`."""
    version: str = ""
    model: str
    window: int
    """Context in tokens, prompt and answer together; 0 if it does not say."""
    routes: dict[str, Mode]
    """The routes that work, the best first."""
    logprob_meaning: LogprobMeaning | None = None
    """None where it could not be measured."""
    checks: tuple[ProbeCheck, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def mode(self) -> Mode | None:
        """The best mode that works; None if nothing does."""
        return next(iter(self.routes.values()), None)

    @property
    def sound(self) -> bool:
        """Whether its samples have token ids."""
        return self.mode in {Mode.EXACT, Mode.OBSERVED}

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the verdict."""
        return {**msgspec.structs.asdict(self), "mode": self.mode, "sound": self.sound}

    def wire(self, mode: Mode | None = None) -> EngineFormat:
        """The format to use, for `mode` or the best. Raises `UsageError` if it does not work."""
        for name, found in self.routes.items():
            if found is mode or (mode is None and found is not Mode.TEXT):
                route = ROUTES[self.engine][name]
                default = route.make(LogprobMeaning.RAW).logprob_meaning
                return route.make(self.logprob_meaning or default)
        wanted = f"no sound {mode} mode" if mode else "no mode that can be trained from"
        advice = "; ".join(self.advice) or "see `tugline doctor`"
        msg = f"the engine at {self.url} ({self.engine} {self.version}) has {wanted}: {advice}"
        raise UsageError(msg)
