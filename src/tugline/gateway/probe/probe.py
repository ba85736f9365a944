"""Find out what a running engine can do, by asking it: which mode is sound, and what to change.

Nothing is believed because a version says so. Every route is tried whole and streamed, with tools
where the engine renders; the meaning of logprobs is measured; a request is left alone to see
whether the engine drops it. A node runs the same probe when it starts, so an engine that loses
token ids is refused before the first session, not found out in the training data (I1, I2).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import aiohttp
import msgspec
import numpy as np

from tugline.chat.engines.base import EngineFormat, EngineRequest
from tugline.chat.tokens import TokenSequence
from tugline.errors import ContextOverflow, EngineError, TuglineError
from tugline.gateway.probe.diagnosis import ROUTES, Check, Outcome, Report
from tugline.gateway.probe.direct import PATIENCE_S, Card, Direct
from tugline.types import Ids, LogprobMeaning, Message, Mode, Role, Sampling, Tool

GONE_WITHIN_S = 2.0
"""How soon a request without a client must be off the engine."""
_TALK = (Message(Role.USER, "Please say in two sentences what you see, then stop."),)
_WORK = (Message(Role.USER, "Read the file notes.txt and tell me what it says."),)
_TOOL = Tool(
    "read",
    "Read a file.",
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)
_ANY_IDS = np.arange(10, 42, dtype=np.int32)
"""A prompt for engines that tell none of theirs; every vocabulary has these."""
_COOL = 0.05
"""Nearly greedy: the likeliest token's processed logprob is about 0, its raw one stays."""
_TELLING = 0.1
"""A logprob closer to 0 says nothing, in nats."""
_MOVED = 0.15
"""Share by which processed logprobs move at least; raw ones in half precision move by 0.03."""
_ENOUGH = 4
"""Telling tokens; a model that is certain of what it says shows few at a time."""
_FAULTS = (aiohttp.ClientError, TimeoutError, TuglineError)


async def probe(url: str, model: str | None = None) -> Report:
    """Everything about the engine at `url`. Raises `EngineError` if it does not answer at all."""
    async with Direct(url) as engine:
        return await _Probe(engine, await engine.card(model)).run()


# --------------------------------------------------------------------------- trying
class _Probe:
    """One examination."""

    def __init__(self, engine: Direct, card: Card) -> None:
        self._engine, self._card = engine, card
        self._checks: list[Check] = []
        self._advice: list[str] = []
        self._prompt = _ANY_IDS
        self._number = 0

    async def run(self) -> Report:
        """All of it, in the order of the report."""
        kind, version = await self._identify()
        window = self._card.max_model_len
        self._note("window", bool(window) or None, f"{window} tokens" if window else "not told")
        await self._learn_prompt(kind)
        sound: dict[str, Mode] = {}
        for name, route in ROUTES[kind].items():
            wire = route.make(LogprobMeaning.RAW)
            if await self._route(name, wire):
                sound[name] = route.mode
            elif route.mode is not Mode.TEXT:
                self._advice.append(f"{name}: {route.advice}")
        meaning = None
        if sound:
            wire = ROUTES[kind][next(iter(sound))].make(LogprobMeaning.RAW)
            await self._aborts(wire)
            await self._overflows(wire)
            meaning = await self._meaning(wire)
        await self._control(kind, meaning)
        return Report(
            url=self._engine.url,
            engine=kind,
            version=version,
            model=self._card.id,
            window=window,
            routes=sound,
            logprob_meaning=meaning,
            checks=tuple(self._checks),
            advice=tuple(self._advice),
        )

    async def _identify(self) -> tuple[str, str]:
        owners = {"tugline": "embedded", "vllm": "vllm", "sglang": "sglang"}
        kind = owners.get(self._card.owned_by, "openai")
        path = {"vllm": "/version", "sglang": "/v1/loads"}.get(kind)
        told = await self._engine.facts(path) if path else {}
        return kind, str(told.get("version", ""))

    async def _learn_prompt(self, kind: str) -> None:
        """Ids of a real conversation, so that token-in is tried with something sensible."""
        chat = ROUTES[kind].get("chat")
        if chat is None:
            return
        try:
            wire = chat.make(LogprobMeaning.RAW)
            answer = await self._engine.ask(wire, self._ask(wire, 1, stream=False))
        except _FAULTS:
            return
        if answer.prompt is not None:
            self._prompt = np.array(msgspec.json.decode(answer.prompt, type=list[int]), np.int32)

    def _ask(self, wire: EngineFormat, count: int, *, stream: bool, **more: Any) -> EngineRequest:
        self._number += 1
        given: dict[str, Any] = {
            "model": self._card.id,
            "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=count),
            "request_id": f"doctor-{time.time_ns()}-{self._number}",
            "stream": stream,
        }
        if wire.mode is Mode.EXACT:
            given["prompt"] = TokenSequence(self._prompt)
        else:
            given["messages"] = _TALK
        return EngineRequest(**(given | more))

    async def _route(self, name: str, wire: EngineFormat) -> bool:
        """Whether a route gives complete answers, whole and streamed, and with tools."""
        tries: list[tuple[str, dict[str, Any], int]] = [("", {}, 24)]
        if wire.mode is Mode.OBSERVED:
            tries.append((", tools", {"messages": _WORK, "tools": (_TOOL,)}, 160))
        good = True
        for what, more, count in tries:
            for stream in (False, True):
                label = f"{name}: {'stream' if stream else 'whole'}{what}"
                asked = self._ask(wire, count, stream=stream, **more)
                good = await self._try(label, self._complete(wire, asked)) and good
        return good

    async def _complete(self, wire: EngineFormat, asked: EngineRequest) -> str:
        answer = await self._engine.ask(wire, asked)
        ids, logprobs = len(answer.ids), len(answer.logprobs)
        if wire.mode is Mode.TEXT:
            return f"about {answer.unreported_tokens} tokens, none of which can be trained on"
        if not ids or ids != logprobs or answer.unreported_tokens:
            missing = answer.unreported_tokens
            msg = f"{ids} token ids, {logprobs} logprobs and {missing} tokens without ids"
            raise EngineError(msg)
        if wire.mode is Mode.OBSERVED and answer.prompt is None:
            msg = "the prompt's ids are not told"
            raise EngineError(msg)
        told = any(delta.spans or delta.version is not None for delta in answer.deltas)
        versions = "with weight versions" if told else "weight versions as announced"
        events = f" in {answer.reads} events" if asked.stream else ""
        return f"{ids} ids and logprobs{events}, {versions}"

    async def _aborts(self, wire: EngineFormat) -> None:
        """Hang up in the middle of a long answer and watch the engine forget it."""
        if await self._engine.running() is None:
            self._note("abort", None, "the engine does not tell what is running")
            return
        await self._try("abort", self._hang_up(wire))

    async def _hang_up(self, wire: EngineFormat) -> str:
        before = await self._engine.running() or 0
        reads = await self._engine.leave(wire, self._ask(wire, self._long(), stream=True), after=4)
        left = time.monotonic()
        await asyncio.sleep(GONE_WITHIN_S / 4)
        while (await self._engine.running() or 0) > before:
            if time.monotonic() - left > GONE_WITHIN_S:
                msg = f"a request still runs {GONE_WITHIN_S:g} s after its client hung up"
                raise EngineError(msg)
            await asyncio.sleep(0.05)
        return f"off the engine within {time.monotonic() - left:.1f} s, left after {reads} events"

    def _long(self) -> int:
        window = self._card.max_model_len or 4096
        return max(64, min(4096, window - 2 * len(self._prompt) - 64))

    async def _overflows(self, wire: EngineFormat) -> None:
        """A prompt beyond the window must be refused as that, since harnesses compact on it."""
        window = self._card.max_model_len
        if not window:
            self._note("context overflow", None, "the window is not known")
            return
        await self._try("context overflow", self._overflow(wire, window))

    async def _overflow(self, wire: EngineFormat, window: int) -> str:
        more: dict[str, Any] = {"messages": (Message(Role.USER, "word " * (window + 64)),)}
        if wire.mode is Mode.EXACT:
            more = {"prompt": TokenSequence(np.full(window + 64, self._prompt[-1], np.int32))}
        try:
            await self._engine.ask(wire, self._ask(wire, 1, stream=True, **more))
        except ContextOverflow as error:
            words, _, _ = str(error).partition(". ")
            return f"told as such: {words}"
        msg = "a prompt beyond the window was answered"
        raise EngineError(msg)

    # ----------------------------------------------------------------------- what logprobs mean
    async def _meaning(self, wire: EngineFormat) -> LogprobMeaning | None:
        """Whether logprobs at a low temperature are those of temperature 1."""
        if wire.mode is Mode.TEXT:
            return None
        telling: list[tuple[float, float]] = []
        try:
            for _ in range(3):
                pairs = await self._same_token_twice(wire)
                telling += [(warm, cool) for warm, cool in pairs if warm < -_TELLING]
                if len(telling) >= _ENOUGH:
                    break
        except _FAULTS as error:
            self._note("logprobs", False, str(error) or type(error).__name__)
            return None
        if not telling:
            self._note("logprobs", None, "the model was too certain to tell raw from processed")
            return None
        moved = sum(abs(cool - warm) for warm, cool in telling) / -sum(w for w, _ in telling)
        raw = moved < _MOVED
        meaning = LogprobMeaning.RAW if raw else LogprobMeaning.PROCESSED
        detail = "before temperature (raw)" if raw else "after temperature (processed)"
        counted = f"{len(telling)} tokens drawn at both {_COOL} and 1 moved by {moved:.0%}"
        self._note("logprobs", True, f"{detail}: {counted}")
        return meaning

    async def _same_token_twice(self, wire: EngineFormat) -> list[tuple[float, float]]:
        """Logprobs of tokens that were drawn in one context at temperature 1 and at `_COOL`."""
        pairs: list[tuple[float, float]] = []
        contexts: list[Ids | None] = [None]
        if wire.mode is Mode.EXACT:
            answer = await self._engine.ask(wire, self._ask(wire, 24, stream=False))
            cuts = range(0, len(answer.ids), 2)
            contexts = [np.concatenate((self._prompt, answer.ids[:cut])) for cut in cuts]
        for context in contexts:
            drawn = {t: await self._draws(wire, context, t) for t in (1.0, _COOL)}
            both = drawn[1.0].keys() & drawn[_COOL].keys()
            pairs += [(drawn[1.0][token], drawn[_COOL][token]) for token in both]
        return pairs

    async def _draws(
        self, wire: EngineFormat, context: Ids | None, temperature: float
    ) -> dict[int, float]:
        more: dict[str, Any] = {} if context is None else {"prompt": TokenSequence(context)}
        more["sampling"] = Sampling(temperature=temperature, top_p=1.0, top_k=0, max_tokens=1)
        asks = [self._ask(wire, 1, stream=False, **more) for _ in range(8)]
        answers = await asyncio.gather(*(self._engine.ask(wire, asked) for asked in asks))
        return {int(a.ids[0]): a.logprobs[0] for a in answers if len(a.ids)}

    # ----------------------------------------------------------------------- the rest
    async def _control(self, kind: str, meaning: LogprobMeaning | None) -> None:
        """Whether weights can be swapped from outside, and what else is worth a flag."""
        if kind == "vllm":
            open_ = bool(await self._engine.get("/is_paused"))
            self._note("weight control", open_, "pause, reload and resume over HTTP")
            if not open_:
                self._advice.append("weights: start vLLM with VLLM_SERVER_DEV_MODE=1 to swap them")
            if meaning is LogprobMeaning.RAW:
                self._advice.append(
                    "logprobs: start vLLM with --logprobs-mode processed_logprobs unless every task"
                    " samples at temperature 1, top_p 1 and without top_k"
                )
        if kind == "sglang":
            info = await self._engine.facts("/server_info")
            self._note("weight control", bool(info), "pause, reload and resume over HTTP")
            if info.get("incremental_streaming_output") is False:
                self._advice.append(
                    "streams: start SGLang with --incremental-streaming-output; without it each "
                    "event repeats the whole answer"
                )
            if meaning is LogprobMeaning.PROCESSED:
                self._advice.append(
                    "logprobs: they are after temperature but before top_p and top_k; leave those "
                    "off, or set SGLANG_RETURN_ORIGINAL_LOGPROB=1 for raw ones"
                )

    async def _try(self, name: str, work: Awaitable[str]) -> bool:
        """Note how `work` went; its result is the detail."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._note(name, True, await work)
        except _FAULTS as error:
            self._note(name, False, str(error) or type(error).__name__)
            return False
        return True

    def _note(self, name: str, good: bool | None, detail: str) -> None:  # noqa: FBT001 - a verdict
        outcome = Outcome.UNKNOWN if good is None else Outcome.PASS if good else Outcome.FAIL
        self._checks.append(Check(name, outcome, detail))
