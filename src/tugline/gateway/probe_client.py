"""Requests to an engine that is probed, and the notes on their outcomes."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest
from tugline.chat.model_call import Request
from tugline.chat.tokens import TokenSequence
from tugline.errors import TuglineError
from tugline.gateway.policy import DEFAULTS
from tugline.gateway.reply import read_reply
from tugline.types import Ids, Message, Mode, Role, Sampling, Tool
from tugline.web.engine_http import ANSWER_TIMEOUT_S, EngineHttp, ModelCard

FAULTS = (OSError, TuglineError)
TALK = (Message(Role.USER, "Please say in two sentences what you see, then stop."),)
_ANY_IDS = np.arange(10, 42, dtype=np.int32)
"""Prompt for engines that do not report prompt ids; every vocabulary has these ids."""
_BOUND = 1000
"""``top_k`` for a server that requires one: it reports as many ids with each token."""


class CheckOutcome(StrEnum):
    """Result of a check."""

    PASS = "pass"  # noqa: S105 - a verdict
    WARN = "warn"
    """It works, with a weakness."""
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The result could not be determined."""


class ProbeCheck(msgspec.Struct, frozen=True):
    """A check of an engine and its outcome."""

    name: str
    outcome: CheckOutcome
    detail: str = ""


class ProbeClient:
    """Client of an engine that is probed; `checks` and `advice` are those of the report."""

    def __init__(self, engine: EngineHttp, card: ModelCard) -> None:
        self.engine = engine
        self.card = card
        self.checks: list[ProbeCheck] = []
        self.advice: list[str] = []
        self.prompt: Ids = _ANY_IDS
        """Ids of a conversation, if the engine reports any."""
        self.kept = False
        """Whether the engine reports kept sets."""
        self._number = 0

    def make_request(  # noqa: PLR0913 - parameters of a request
        self,
        wire: EngineFormat,
        count: int,
        *,
        stream: bool = False,
        messages: Sequence[Message] = TALK,
        tools: Sequence[Tool] = (),
        prompt: Ids | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        experts: bool = False,
        kept: bool = False,
    ) -> EngineRequest:
        """Make a request for `count` tokens after the messages, or `prompt` in exact mode."""
        self._number += 1
        model = self.card.id
        ids = self.prompt if prompt is None else prompt
        bound = _BOUND if self.kept and wire.name == "vllm" else 0
        return EngineRequest(
            request=Request(
                model=model, messages=tuple(messages), tools=tuple(tools), stream=stream
            ),
            model=model,
            sampling=Sampling(
                temperature=temperature, top_p=1.0, top_k=top_k or bound, max_tokens=count
            ),
            request_id=f"probe-{time.time_ns()}-{self._number}",
            prompt=TokenSequence(ids) if wire.mode is Mode.EXACT else None,
            stream_interval=None if stream else DEFAULTS.stream_interval,
            experts=experts,
            kept=kept,
        )

    async def sample(self, wire: EngineFormat, count: int, **options: Any) -> Delta:
        """Sample an answer and join its deltas; `options` are those of `make_request`.

        Raises `EngineError` or `OSError`.
        """
        whole = Delta()
        ask = self.make_request(wire, count, **options)
        async for delta in read_reply(self.engine, self.engine.url, wire, ask):
            whole.ids += delta.ids
            whole.logprobs += delta.logprobs
            whole.kept += delta.kept
            whole.unreported_tokens += delta.unreported_tokens
            whole.prompt = whole.prompt or delta.prompt
            whole.spans = whole.spans or delta.spans
            whole.version = delta.version if whole.version is None else whole.version
            if whole.experts is None:
                whole.experts = delta.experts
            elif delta.experts is not None and whole.experts.is_continued_by(delta.experts):
                whole.experts.append(delta.experts)
        return whole

    async def attempt(self, name: str, work: Awaitable[str]) -> bool:
        """Await `work` and note its outcome; its result or error is the detail."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                self.note(name, True, await work)
        except FAULTS as error:
            self.note(name, False, str(error) or type(error).__name__)
            return False
        return True

    def note(self, name: str, passed: bool | None, detail: str) -> None:  # noqa: FBT001 - a verdict
        """Add the outcome of a check; None: unknown."""
        outcomes = {True: CheckOutcome.PASS, False: CheckOutcome.FAIL, None: CheckOutcome.UNKNOWN}
        self.checks.append(ProbeCheck(name, outcomes[passed], detail))

    def warn(self, name: str, detail: str) -> None:
        """Add a check that passes with a weakness."""
        self.checks.append(ProbeCheck(name, CheckOutcome.WARN, detail))
