"""Recompute log probabilities of sampled ids with an engine, each in its exact context.

One request per exact chain of calls scores all answers of the chain, so a session of T turns costs
O(tokens) (I7). vLLM and SGLang recompute at temperature 1; captured log probabilities are compared
only if their meaning is the same.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from tugline.chat.engines.base import NEUTRAL, parse_engine_error, parse_version
from tugline.chat.tokens import TokenSequence
from tugline.errors import EngineError
from tugline.traces.base import find_distribution
from tugline.traces.lineage import build_chains
from tugline.types import Call, Ids, LogprobMeaning, Logprobs
from tugline.types.task import INT32
from tugline.web.engine_http import EngineHttp, ModelCard

T = TypeVar("T")
_OWNERS = {"tugline": "/v1/models", "vllm": "/weight_info", "sglang": "/model_info"}
"""Route of the weight version, by the owner in ``/v1/models``; only these engines can score."""


_PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, **NEUTRAL, "ignore_eos": True}
"""Sampling parameters under which raw and processed log probabilities are the same."""


class _Scored(msgspec.Struct):
    logprob: float


class Sampled(NamedTuple):
    """Sampled ids and their log probabilities, both of shape ``(n,)``."""

    ids: Ids
    logprobs: Logprobs


class _Prompt(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Scored] | None]


class _Completion(msgspec.Struct):
    choices: list[_Prompt]


class _SampledLogprobs(msgspec.Struct):
    token_logprobs: list[float]


class _SampledChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _SampledLogprobs | None = None


class _SampledCompletion(msgspec.Struct):
    choices: list[_SampledChoice]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Generated(msgspec.Struct):
    meta_info: _Meta


class _SampledMeta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]


class _SampledGenerated(msgspec.Struct):
    meta_info: _SampledMeta


@dataclass(frozen=True, slots=True)
class Scorer:
    """Client of an engine that computes log probabilities of given ids; see `connect_scorer`."""

    engine: EngineHttp
    card: ModelCard
    version: int | None
    """Version of the engine's weights; None if not reported."""
    max_ids: int | None
    """Maximum ids in one request; None if not reported."""

    @property
    def embedded(self) -> bool:
        """Whether the engine is the embedded one, which scores at any temperature."""
        return self.card.owned_by == "tugline"

    async def score(self, ids: Ids, start: int, temperature: float = 1.0) -> Logprobs:
        """Return the logprobs of ``ids[start:]``, `start` at least 1; NaN beyond `max_ids`.

        `temperature` applies to the embedded engine only. Raises `EngineError`.
        """
        sent = ids[: self.max_ids]
        logprobs = np.full(len(ids) - start, np.nan, np.float32)
        if len(sent) > start:
            request = self._score_sglang if self.card.owned_by == "sglang" else self._score_openai
            values = await request(sent, start, temperature)
            if len(values) != len(sent) - start:
                raise EngineError(
                    f"the engine returned logprobs for {len(values)} of {len(sent) - start} ids"
                )
            logprobs[: len(values)] = values
        return logprobs

    async def _score_openai(self, ids: Ids, start: int, temperature: float) -> list[float]:
        if self.embedded:
            params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": temperature}
            body: dict[str, Any] = {"model": self.card.id, "sampling_params": params}
            raw = await self._post("/inference/v1/generate", b'{"token_ids":[', ids, body)
            by_id = _decode(raw, _Prompt).prompt_logprobs
        else:
            # with --return-sampling-mask, vLLM refuses requests without top_k
            body = {"model": self.card.id, "max_tokens": 1, "prompt_logprobs": 0, "top_k": 1}
            raw = await self._post("/v1/completions", b'{"prompt":[', ids, body)
            by_id = _decode(raw, _Completion).choices[0].prompt_logprobs
        pairs = zip(ids[start:].tolist(), by_id[start:], strict=False)
        return [scored[str(i)].logprob for i, scored in pairs if scored and str(i) in scored]

    async def _score_sglang(self, ids: Ids, start: int, _temperature: float) -> list[float]:
        """Score with SGLang: the range starts one id early, because its first id has no value."""
        body = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        raw = await self._post("/generate", b'{"input_ids":[', ids, body)
        values = _decode(raw, _Generated).meta_info.input_token_logprobs[1:]
        pairs = zip(ids[start:].tolist(), values, strict=False)
        return [value for i, (value, scored, _) in pairs if value is not None and i == scored]

    async def sample(self, ids: Ids, count: int) -> Sampled | None:
        """Sample `count` ids after `ids` at temperature 1; the engine may use its prefix cache.

        Returns None for the embedded engine, and for vLLM before 0.10.2, which reports no ids.
        Raises `EngineError`.
        """
        if self.embedded:
            return None
        if self.card.owned_by == "sglang":
            params = {"max_new_tokens": count, "top_k": -1, **_PLAIN}
            body: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
            raw = await self._post("/generate", b'{"input_ids":[', ids, body)
            meta = _decode(raw, _SampledGenerated).meta_info
            pairs = [(i, value) for value, i, _ in meta.output_token_logprobs]
        else:
            body = {"model": self.card.id, "max_tokens": count, "top_k": INT32, **_PLAIN}
            body |= {"logprobs": 0, "return_token_ids": True}
            raw = await self._post("/v1/completions", b'{"prompt":[', ids, body)
            choice = _decode(raw, _SampledCompletion).choices[0]
            if choice.token_ids is None or choice.logprobs is None:
                return None
            pairs = [*zip(choice.token_ids, choice.logprobs.token_logprobs, strict=False)]
        sampled = np.array([i for i, _ in pairs], np.int32)
        return Sampled(sampled, np.array([value for _, value in pairs], np.float32))

    async def _post(self, path: str, before: bytes, ids: Ids, body: dict[str, Any]) -> bytes:
        data = b"".join(TokenSequence(ids).to_json(before, b"]," + msgspec.json.encode(body)[1:]))
        status, raw = await self.engine.post(path, data)
        if status != 200:
            raise parse_engine_error(status, raw, None)
        return raw


@asynccontextmanager
async def connect_scorer(
    url: str, model: str | None = None, key: str = ""
) -> AsyncIterator[Scorer]:
    """Connect to the engine at `url`; `model` is a served name, the first if None.

    Raises `EngineError` if the engine is unreachable or cannot score, `UsageError` if it does not
    serve the model.
    """
    async with EngineHttp(url, key) as engine:
        card = await engine.card(model)
        if card.owned_by not in _OWNERS:
            msg = (
                f"{url} is not a vLLM, SGLang or embedded engine, and only these recompute logprobs"
            )
            raise EngineError(msg)
        facts = await engine.get_object(_OWNERS[card.owned_by])
        facts = facts["data"][0] if card.owned_by == "tugline" else facts
        reported = facts.get("weight_version")
        version = None if reported is None else parse_version(str(reported))
        yield Scorer(engine, card, version, await _read_max_ids(engine, card))


async def _read_max_ids(engine: EngineHttp, card: ModelCard) -> int | None:
    """Read the maximum ids of a request: one below the window, or below SGLang's lower bound."""
    if card.owned_by == "sglang":
        bound = (await engine.get_object("/server_info")).get("max_req_input_len")
        if isinstance(bound, int):
            return bound - 1
    return card.max_model_len - 1 if card.max_model_len else None


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        msg = f"the engine's response lacks log probabilities: {error}"
        raise EngineError(msg) from error


# --------------------------------------------------------------------------- comparing
def why_not_comparable(call: Call, scorer: Scorer) -> str:
    """Return why the engine cannot recompute the logprobs of `call`; empty if it can."""
    if call.replayed:
        return "replayed from another session's recording; verify it there"
    sampling = call.sampling
    version = scorer.version
    others = sorted({span.version for span in call.versions} - {version})
    if version is not None and others:
        names = ", ".join(map(str, others))
        return f"sampled under weights of version {names}, but the engine has version {version}"
    if call.logprob_meaning is LogprobMeaning.RAW:
        return ""
    if call.constrained:
        return "constrained by a grammar or banned ids, which the engine does not apply to a prompt"
    greedy = sampling.temperature == 0 and len(call.logprobs) > 0
    if greedy and not call.logprobs.any():
        return "captured greedily among one id, which engines do not leave when they recompute"
    if find_distribution(call).needs_kept:
        return (
            "captured after top_p, top_k or min_p, which engines do not apply when they recompute"
        )
    if _scoring_temperature(call, scorer) != (sampling.temperature or 1.0):  # 0 is captured as 1
        return f"captured at temperature {sampling.temperature:g}, but this engine recomputes at 1"
    return ""


def _scoring_temperature(call: Call, scorer: Scorer) -> float:
    raw = call.logprob_meaning is LogprobMeaning.RAW
    return (call.sampling.temperature or 1.0) if scorer.embedded and not raw else 1.0


async def recompute_logprobs(scorer: Scorer, calls: Sequence[Call]) -> dict[int, Logprobs]:
    """Return the logprobs of each call's sampled ids, by call number. Raises `EngineError`.

    NaN beyond the scorer's `max_ids`; calls without ids are omitted.
    """
    recomputed: dict[int, Logprobs] = {}
    for chain in build_chains(calls):
        for temperature in sorted({_scoring_temperature(call, scorer) for call in chain.calls}):
            same = [c for c in chain.calls if _scoring_temperature(c, scorer) == temperature]
            ids = np.concatenate((same[-1].prompt_ids, same[-1].sampled_ids))
            start = len(same[0].prompt_ids)
            scores = await scorer.score(ids, start, temperature)
            for call in same:
                at = len(call.prompt_ids) - start
                recomputed[call.number] = scores[at : at + len(call.sampled_ids)]
    return recomputed
