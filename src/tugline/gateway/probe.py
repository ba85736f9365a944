"""Probe a running engine: working modes, meaning of logprobs, and advice on settings.

Version numbers are not trusted. Every route is tried as for clients that stream and for those that
get whole answers, with tools if the engine renders; the meaning of logprobs is measured. A node
runs the same probe when it starts, so an engine that loses token ids is refused before the first
session (I1, I2).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
import numpy as np

from tugline import log
from tugline.chat.engines import ROUTES
from tugline.chat.engines.base import Delta, EngineFormat, Feature
from tugline.errors import ContextOverflow, EngineError, UsageError
from tugline.gateway.policy import DEFAULTS, CallSettings
from tugline.gateway.probe_client import FAULTS, TALK, CheckOutcome, ProbeCheck, ProbeClient
from tugline.gateway.probe_reports import REPORTS, ModelFacts, check_reports, find_kept
from tugline.gateway.replicas import Upstream
from tugline.types import Ids, LogprobMeaning, Message, Mode, Role, Tool
from tugline.web.engine_http import EngineHttp, ModelCard

_WORK = (Message(Role.USER, "Read the file notes.txt and tell me what it says."),)
_TOOL = Tool(
    "read",
    "Read a file.",
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)
_COOL = 0.05
"""Low temperature: the likeliest token's processed logprob is about 0, its raw one unchanged."""
_MIN_LOGPROB = 0.1
"""Nats below 0 from which a logprob distinguishes raw from processed."""
_MIN_SHIFT = 0.15
"""Minimum relative shift of processed logprobs; raw ones in half precision shift by 0.03."""
_MIN_TOKENS = 4
"""Number of distinguishing tokens to collect; a confident model yields few per request."""
_SHORTEST = 2
"""Tokens of the shortest prompt: vLLM on CPU dies of one token for a hybrid model."""
_CONTROL = "pause, reload and resume over HTTP"
_LOAD = {
    "vllm": (b"vllm:num_requests_waiting", "start vLLM without --disable-log-stats"),
    "sglang": (b"sglang:num_queue_reqs", "start SGLang with --enable-metrics"),
}
"""A metric of an engine's load, and the setting without which it is missing."""

_log = log.get("gateway.probe")


# --------------------------------------------------------------------------- reports
class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of an engine, and advice on its settings."""

    url: str
    engine: str
    """Kind of engine, a key of `ROUTES`."""
    version: str = ""
    model: str
    window: int
    """Context length in tokens, prompt and answer together; 0 if not reported."""
    routes: dict[str, Mode]
    """Working routes and their modes, best first."""
    logprob_meaning: LogprobMeaning | None = None
    """None if it could not be measured."""
    experts: tuple[int, int] | None = None
    """Layers with experts and the number of experts of a token; None if none are reported."""
    kept: bool = False
    """Whether kept sets are reported."""
    checks: tuple[ProbeCheck, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def mode(self) -> Mode | None:
        """Best working mode; None if no route works."""
        return next(iter(self.routes.values()), None)

    @property
    def sound(self) -> bool:
        """Whether the engine's samples have token ids."""
        return self.mode in {Mode.EXACT, Mode.OBSERVED}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with `mode` and `sound`."""
        return {**msgspec.structs.asdict(self), "mode": self.mode, "sound": self.sound}

    def wire(self, mode: Mode | None = None) -> EngineFormat:
        """Return the format for `mode`, or the best one.

        Raises `UsageError` if none works, or if what the engine reports of tokens is wrong.
        """
        for check in self.checks:
            if (
                check.name in REPORTS
                and check.outcome is CheckOutcome.FAIL
                and mode is not Mode.TEXT
            ):
                msg = f"the {check.name} of the engine at {self.url} are wrong: {check.detail}"
                raise UsageError(msg)
        for name, working in self.routes.items():
            if working is mode or (mode is None and working is not Mode.TEXT):
                route = ROUTES[self.engine][name]
                reported = Feature.EXPERTS in route.features
                raw = self.logprob_meaning is LogprobMeaning.RAW
                return route(
                    self.logprob_meaning,
                    experts=self.experts if reported else None,
                    kept=self.kept and not raw,
                )
        wanted = f"{mode} mode" if mode else "any mode with token ids, which training requires"
        failed = [f"{c.name}: {c.detail}" for c in self.checks if c.outcome == "fail"]
        advice = "; ".join([*failed[:1], *self.advice]) or "see `tugline doctor`"
        msg = (
            f"the engine at {self.url} ({self.engine} {self.version}) does not support "
            f"{wanted}: {advice}"
        )
        raise UsageError(msg)


async def probe(
    url: str, model: str | None = None, key: str = "", *, facts: ModelFacts | None = None
) -> EngineReport:
    """Probe the engine at `url`. Raises `EngineError` if it does not answer.

    With `facts`, experts and kept sets are checked thoroughly, which may clear the engine's cache.
    """
    async with EngineHttp(url, key) as engine:
        return await _Probe(ProbeClient(engine, await engine.card(model)), facts).run()


async def connect(
    urls: Sequence[str],
    *,
    mode: Mode | None = None,
    model: str | None = None,
    settings: CallSettings = DEFAULTS,
    key: str = "",
) -> Upstream:
    """Probe the replicas at `urls` and connect to them in `mode`, or the best working mode.

    Raises `EngineError` if a replica does not answer; `UsageError`, naming the flag to add, if
    the mode does not work, the served models if `model` is not among them, or the difference
    between replicas.
    """
    reports = await asyncio.gather(*(probe(url, model, key) for url in urls))
    if not reports:
        raise UsageError(
            "the list of engine URLs is empty; give at least one, such as http://127.0.0.1:8000"
        )
    first = reports[0]
    wires = [report.wire(mode) for report in reports]
    for report in reports[1:]:
        for field in ("engine", "model", "window", "logprob_meaning", "experts", "kept"):
            left, right = getattr(first, field), getattr(report, field)
            if left != right:
                where = f"{left} at {first.url} and {right} at {report.url}"
                raise UsageError(f"all replicas must have the same {field}, but it is {where}")
    for report, wire in zip(reports, wires, strict=True):
        _log.info("engine", url=report.url, engine=wire.name, mode=wire.mode, model=report.model)
    card = ModelCard(first.model, first.window)
    return Upstream(urls, wires[0], model=card.id, card=card, settings=settings, key=key)


# --------------------------------------------------------------------------- checks
class _Probe:
    """A run of all checks on one engine."""

    def __init__(self, client: ProbeClient, model: ModelFacts | None) -> None:
        self._client = client
        self._engine = client.engine
        self._card = client.card
        self._model = model
        """Facts about the model, for a thorough check of reports; None: only what a node needs."""

    async def run(self) -> EngineReport:
        """Run all checks, in the order of the report."""
        kind, version = await self._identify()
        window = self._card.max_model_len
        self._client.note(
            "window", bool(window) or None, f"{window} tokens" if window else "not reported"
        )
        self._client.kept = await find_kept(self._client, kind)
        await self._learn_prompt(kind)
        working: dict[str, Mode] = {}
        for name, route in ROUTES[kind].items():
            if await self._check_route(name, route(kept=self._client.kept)):
                working[name] = route.mode
            elif route.mode is not Mode.TEXT:
                self._client.advice.append(f"{name}: {route.advice}")
        meaning = shape = None
        if working:
            wire = ROUTES[kind][next(iter(working))](kept=self._client.kept)
            if window:
                await self._client.attempt("context overflow", self._provoke_overflow(wire, window))
            else:
                self._client.note("context overflow", None, "the engine does not report its window")
            meaning = await self._measure_logprobs(wire)
            shape = await check_reports(self._client, wire, self._model)
        await self._check_control(kind, meaning)
        await self._check_load(kind)
        return EngineReport(
            url=self._engine.url,
            engine=kind,
            version=version,
            model=self._card.id,
            window=window,
            routes=working,
            logprob_meaning=meaning,
            experts=shape,
            kept=self._client.kept,
            checks=tuple(self._client.checks),
            advice=tuple(self._client.advice),
        )

    async def _identify(self) -> tuple[str, str]:
        owners = {"tugline": "embedded", "vllm": "vllm", "sglang": "sglang"}
        kind = owners.get(self._card.owned_by, "openai")
        path = {"vllm": "/version", "sglang": "/v1/loads"}.get(kind)
        facts = await self._engine.get_object(path) if path else {}
        return kind, str(facts.get("version", ""))

    async def _learn_prompt(self, kind: str) -> None:
        """Get the prompt ids of a real conversation, with which to test token input."""
        chat = ROUTES[kind].get("chat")
        if chat is None:
            return
        with contextlib.suppress(*FAULTS):
            answer = await self._client.sample(chat(kept=self._client.kept), 1)
            if answer.prompt is not None:
                ids = msgspec.json.decode(answer.prompt, type=list[int])
                self._client.prompt = np.array(ids, np.int32)

    async def _check_route(self, name: str, wire: EngineFormat) -> bool:
        """Check whether a route gives complete answers, whole and streamed, and with tools."""
        passed = True
        for tools in ((), (_TOOL,)) if wire.mode is Mode.OBSERVED else ((),):
            count = 160 if tools else 24
            messages = _WORK if tools else TALK
            for stream in (False, True):
                label = f"{name}: {'stream' if stream else 'whole'}{', tools' if tools else ''}"
                answer = self._client.sample(
                    wire, count, stream=stream, messages=messages, tools=tools
                )
                passed = (
                    await self._client.attempt(label, self._check_complete(wire, answer)) and passed
                )
        return passed

    async def _check_complete(self, wire: EngineFormat, sampling: Awaitable[Delta]) -> str:
        answer = await sampling
        ids = len(answer.ids)
        logprobs = len(answer.logprobs)
        missing = answer.unreported_tokens
        if wire.mode is Mode.TEXT:
            return f"about {missing} tokens without ids, which cannot be trained on"
        if not ids or ids != logprobs or missing:
            msg = f"{ids} token ids, {logprobs} logprobs and {missing} tokens without ids"
            raise EngineError(msg)
        if wire.mode is Mode.OBSERVED and answer.prompt is None:
            raise EngineError("the ids of the prompt are not reported")
        versioned = answer.spans or answer.version is not None
        versions = "with weight versions" if versioned else "weight versions as announced"
        return f"{ids} ids and logprobs, {versions}"

    async def _provoke_overflow(self, wire: EngineFormat, window: int) -> str:
        """Check that a prompt beyond the window is refused as such: harnesses compact on it."""
        ids = np.full(window + 64, self._client.prompt[-1], np.int32)
        messages = (Message(Role.USER, "word " * len(ids)),)
        try:
            await self._client.sample(wire, 1, stream=True, messages=messages, prompt=ids)
        except ContextOverflow as error:
            return f"refused with the right error: {str(error).partition('. ')[0]}"
        raise EngineError("a prompt longer than the window was answered")

    # ----------------------------------------------------------------------- logprobs
    async def _measure_logprobs(self, wire: EngineFormat) -> LogprobMeaning | None:
        """Compare logprobs at a low temperature with those at temperature 1; None if unknown."""
        if wire.mode is Mode.TEXT:
            return None
        pairs: list[tuple[float, float]] = []
        try:
            for _ in range(3):
                both = await self._sample_at_both_temperatures(wire)
                pairs += [(warm, cool) for warm, cool in both if warm < -_MIN_LOGPROB]
                if len(pairs) >= _MIN_TOKENS:
                    break
        except FAULTS as error:
            self._client.note("logprobs", False, str(error) or type(error).__name__)
            return None
        if not pairs:
            self._client.note(
                "logprobs", None, "sampling was too deterministic to distinguish raw from processed"
            )
            return None
        shift = sum(abs(cool - warm) for warm, cool in pairs) / -sum(warm for warm, _ in pairs)
        raw = shift < _MIN_SHIFT
        detail = "before temperature (raw)" if raw else "after temperature (processed)"
        counted = f"{len(pairs)} tokens sampled at both {_COOL} and 1 moved by {shift:.0%}"
        self._client.note("logprobs", True, f"{detail}: {counted}")
        return LogprobMeaning.RAW if raw else LogprobMeaning.PROCESSED

    async def _sample_at_both_temperatures(self, wire: EngineFormat) -> list[tuple[float, float]]:
        """List logprobs, at temperature 1 and `_COOL`, of tokens sampled at both in one context."""
        prompts: list[Ids | None] = [None]
        if wire.mode is Mode.EXACT:
            answer = np.array((await self._client.sample(wire, 24)).ids, np.int32)
            whole = np.concatenate((self._client.prompt, answer))
            lengths = np.linspace(_SHORTEST, len(whole), 16, dtype=int)
            prompts = [whole[:length] for length in lengths]
        pairs: list[tuple[float, float]] = []
        for prompt in prompts:
            warm, cool = [await self._sample_tokens(wire, t, prompt) for t in (1.0, _COOL)]
            pairs += [(warm[token], cool[token]) for token in warm.keys() & cool.keys()]
        return pairs

    async def _sample_tokens(
        self, wire: EngineFormat, temperature: float, prompt: Ids | None
    ) -> dict[int, float]:
        """Sample eight single tokens; return their logprobs by id."""
        answers = await asyncio.gather(
            *(
                self._client.sample(wire, 1, prompt=prompt, temperature=temperature)
                for _ in range(8)
            )
        )
        return {a.ids[0]: a.logprobs[0] for a in answers if a.ids}

    # ----------------------------------------------------------------------- control
    async def _check_control(self, kind: str, meaning: LogprobMeaning | None) -> None:
        """Check whether weights can be swapped over HTTP, and advise on flags."""
        if kind == "vllm":
            control = bool(await self._engine.get_object("/is_paused"))
            self._client.note("weight control", control, _CONTROL)
            if not control:
                self._client.advice.append(
                    "weights: start vLLM with VLLM_SERVER_DEV_MODE=1 to swap them"
                )
            if meaning is LogprobMeaning.RAW:
                self._client.advice.append(
                    "logprobs: start vLLM with --logprobs-mode processed_logprobs unless every task"
                    " samples at temperature 1, top_p 1 and without top_k"
                )
        if kind == "sglang":
            info = await self._engine.get_object("/server_info")
            self._client.note("weight control", bool(info), _CONTROL)
            if info.get("incremental_streaming_output") is False:
                self._client.advice.append(
                    "streams: start SGLang with --incremental-streaming-output; without it each "
                    "event repeats the whole answer"
                )
            if meaning is LogprobMeaning.PROCESSED and not self._client.kept:
                self._client.advice.append(
                    "logprobs: they are computed after temperature, but before top_p, top_k and "
                    "min_p, and no kept sets are reported: leave these off"
                )

    async def _check_load(self, kind: str) -> None:
        """Check whether the engine reports its load."""
        if kind not in _LOAD:
            return
        metric, setting = _LOAD[kind]
        if metric in await self._engine.get("/metrics"):
            self._client.note("load", True, "requests, KV memory and tokens at /metrics")
            return
        msg = "not reported: agents start whatever it is, and the console has no chart of it"
        self._client.warn("load", msg)
        self._client.advice.append(f"load: {setting}")
