"""Ask an engine again how likely the sampled ids were, each in its exact context.

One request per exact chain of calls scores all its answers, so a session of T turns costs O(tokens)
(I7). vLLM and SGLang recompute the model's own log probabilities, those of temperature 1; captured
ones are compared where they mean the same, and only there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from tugline.chat.engines.base import parse_engine_error, parse_version
from tugline.chat.tokens import TokenSequence
from tugline.errors import EngineError
from tugline.gateway.probe.direct import Card, Direct
from tugline.recording.verify.findings import Turn
from tugline.traces.base import chains
from tugline.types import Call, Ids, LogprobMeaning, Logprobs

T = TypeVar("T")
_OWNERS = {"tugline": "/v1/models", "vllm": "/weight_info", "sglang": "/model_info"}
"""Engines that can score, as ``/v1/models`` names their owner, and who tells their version."""


class _Scored(msgspec.Struct):
    logprob: float


class _Prompt(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Scored] | None]


class _Completion(msgspec.Struct):
    choices: list[_Prompt]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Generated(msgspec.Struct):
    meta_info: _Meta


@dataclass(frozen=True, slots=True)
class Scorer:
    """An engine that is asked for log probabilities of given ids; see `scorer_at`."""

    direct: Direct
    card: Card
    version: int | None
    """Of its weights; None where it does not say."""
    longest: int | None
    """Ids that one request may hold; None where it does not say."""

    @property
    def embedded(self) -> bool:
        """Whether it scores at any temperature."""
        return self.card.owned_by == "tugline"

    async def logprobs(self, ids: Ids, start: int, temperature: float = 1.0) -> Logprobs:
        """Of ``ids[start:]``, `start` at least 1; NaN for those beyond `longest`.

        `temperature` is for the embedded engine. Raises `EngineError`.
        """
        asked = ids[: self.longest]
        found = np.full(len(ids) - start, np.nan, np.float32)
        if len(asked) > start:
            ask = self._sglang if self.card.owned_by == "sglang" else self._completion
            values = await ask(asked, start, temperature)
            if len(values) != len(asked) - start:
                msg = f"the engine scored {len(values)} of {len(asked) - start} ids"
                raise EngineError(msg)
            found[: len(values)] = values
        return found

    async def _completion(self, ids: Ids, start: int, temperature: float) -> list[float]:
        if self.embedded:
            params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": temperature}
            body: dict[str, Any] = {"model": self.card.id, "sampling_params": params}
            raw = await self._post("/inference/v1/generate", b'{"token_ids":[', ids, body)
            told = _decoded(raw, _Prompt).prompt_logprobs
        else:
            body = {"model": self.card.id, "max_tokens": 1, "prompt_logprobs": 0}
            raw = await self._post("/v1/completions", b'{"prompt":[', ids, body)
            told = _decoded(raw, _Completion).choices[0].prompt_logprobs
        pairs = zip(ids[start:].tolist(), told[start:], strict=False)
        return [scored[str(one)].logprob for one, scored in pairs if scored and str(one) in scored]

    async def _sglang(self, ids: Ids, start: int, _temperature: float) -> list[float]:
        """The first of those asked for has no value, since nothing before it is looked at."""
        body = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        raw = await self._post("/generate", b'{"input_ids":[', ids, body)
        told = _decoded(raw, _Generated).meta_info.input_token_logprobs[1:]
        pairs = zip(ids[start:].tolist(), told, strict=False)
        return [value for one, (value, other, _) in pairs if value is not None and one == other]

    async def _post(self, path: str, before: bytes, ids: Ids, body: dict[str, Any]) -> bytes:
        data = TokenSequence(ids).to_json(before, b"]," + msgspec.json.encode(body)[1:])
        headers = {"content-type": "application/json"}
        try:
            async with self.direct.client.post(
                self.direct.url + path, data=data, headers=headers
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            msg = f"the engine at {self.direct.url} was lost: {error or type(error).__name__}"
            raise EngineError(msg) from error
        if response.status != 200:
            raise parse_engine_error(response.status, raw, None)
        return raw


@asynccontextmanager
async def scorer_at(url: str) -> AsyncIterator[Scorer]:
    """The engine at `url`. Raises `EngineError` if it does not answer, or cannot score."""
    async with Direct(url) as direct:
        card = await direct.card(None)
        if card.owned_by not in _OWNERS:
            msg = f"{url} is not vLLM, SGLang or the embedded engine, so it cannot be asked again"
            raise EngineError(msg)
        told = await direct.facts(_OWNERS[card.owned_by])
        told = told["data"][0] if card.owned_by == "tugline" else told
        version = told.get("weight_version")
        yield Scorer(
            direct,
            card,
            version=None if version is None else parse_version(str(version)),
            longest=await _longest(direct, card),
        )


async def _longest(direct: Direct, card: Card) -> int | None:
    """Engines want room for one id more; SGLang for a few, and its own bound is one too many."""
    if card.owned_by == "sglang":
        bound = (await direct.facts("/server_info")).get("max_req_input_len")
        if isinstance(bound, int):
            return bound - 1
    return card.max_model_len - 1 if card.max_model_len else None


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        msg = f"the engine's answer has no log probabilities of its prompt: {error}"
        raise EngineError(msg) from error


# --------------------------------------------------------------------------- comparing
def refusal(call: Call, scorer: Scorer) -> str:
    """Why this engine cannot judge what was captured for `call`; empty if it can."""
    if call.replayed:
        return "told from another session's recording; judge it there"
    sampling, version = call.sampling, scorer.version
    others = sorted({span.version for span in call.versions} - {version})
    if version is not None and others:
        told = ", ".join(map(str, others))
        return f"sampled under weights of version {told}, the engine has {version}"
    if call.logprob_meaning is LogprobMeaning.RAW:
        return ""
    if call.constrained:
        return "held by a grammar or a ban, which the engine does not know of"
    if sampling.top_p not in {None, 1.0} or sampling.top_k not in {None, 0}:
        return "captured after top_p or top_k, which no engine recomputes"
    if _heat(call, scorer) != (sampling.temperature or 1.0):  # at 0 they are told as at 1
        return f"captured at temperature {sampling.temperature:g}, this engine recomputes at 1"
    return ""


def _heat(call: Call, scorer: Scorer) -> float:
    """The temperature to recompute at."""
    raw = call.logprob_meaning is LogprobMeaning.RAW
    return (call.sampling.temperature or 1.0) if scorer.embedded and not raw else 1.0


async def recompute(scorer: Scorer, calls: Sequence[Call]) -> dict[int, Logprobs]:
    """Log probabilities of each call's sampled ids, by its number; raises `EngineError`.

    NaN beyond what the engine takes in one request; calls without ids are left out.
    """
    found: dict[int, Logprobs] = {}
    for chain in chains(calls):
        for heat in sorted({_heat(call, scorer) for call in chain.calls}):
            mine = [call for call in chain.calls if _heat(call, scorer) == heat]
            whole = np.concatenate((mine[-1].prompt_ids, mine[-1].sampled_ids))
            start = len(mine[0].prompt_ids)
            scores = await scorer.logprobs(whole, start, heat)
            for call in mine:
                place = len(call.prompt_ids) - start
                found[call.number] = scores[place : place + len(call.sampled_ids)]
    return found


def compare(turn: Turn, call: Call, again: Logprobs) -> None:
    """Note in `turn` how far captured and recomputed are apart."""
    apart = (call.logprobs.astype(np.float64) - again)[np.isfinite(again)]
    turn.scored = len(apart)
    if len(apart):
        turn.max_dlogprob = float(np.abs(apart).max())
        turn.mean_dlogprob = float(np.abs(apart).mean())
        turn.kl = float(apart.mean())
        turn.kl3 = float((np.exp(-apart) - 1 + apart).mean())
