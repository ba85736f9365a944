"""Checks of the experts and kept sets that an engine reports.

Engines have returned experts that were all zero while the text was right. Shapes alone do not
prove them, so their values are checked, and they are compared between two computations of the same
prompt; kept sets are compared with the likeliest ids.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tugline.chat.engines import ROUTES, reports
from tugline.chat.engines.base import EngineFormat, Feature, ReportedExperts
from tugline.errors import EngineError, UsageError
from tugline.gateway.probe_client import FAULTS, ProbeClient
from tugline.recording.experts import check_experts
from tugline.types import Experts, Ids, Mode
from tugline.web.engine_http import ANSWER_TIMEOUT_S

EXPERTS = "experts"
KEPT = "kept sets"
_REPEATS = "experts, computed twice"
_RECOMPUTED = "kept sets, recomputed"
REPORTS = frozenset({EXPERTS, KEPT, _RECOMPUTED})
"""Names of the checks whose failure makes an engine unusable."""
_COUNT = 8
"""Tokens of an answer."""
_LONG = 1024
"""Tokens of the prompt from which the shape of SGLang's experts is inferred."""
_TOP_K = 5
_LISTED = 10
"""Number of the likeliest ids that are compared with kept sets."""
_CLOSE = 1e-4
"""Nats by which ids are too close for a set to be computed."""
_MOST_CHANGED = 0.05
"""Share of experts that may differ between two computations of a prompt."""
_FLUSH = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}
"""Routes that clear the prefix cache, by engine."""
_SETTINGS = {
    ("vllm", EXPERTS): "start vLLM with --enable-return-routed-experts, VLLM_USE_V2_MODEL_RUNNER=1"
    " and prefix caching",
    ("vllm", KEPT): "start vLLM with --return-sampling-mask, --logprobs-mode processed_logprobs and"
    " VLLM_USE_V2_MODEL_RUNNER=1",
    ("sglang", EXPERTS): "start SGLang with --enable-return-routed-experts",
    ("sglang", KEPT): "upgrade SGLang, and do not use speculative decoding",
    ("embedded", KEPT): "upgrade Tugline",
}


class ModelFacts(msgspec.Struct, frozen=True):
    """What a model's configuration says of its experts; 0 where it says nothing."""

    experts: int = 0
    top_k: int = 0

    @classmethod
    def read(cls, folder: Path) -> "ModelFacts":
        """Read ``config.json`` of a model's folder. Raises `UsageError`."""
        try:
            config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"cannot read {folder / 'config.json'}: {error}") from error
        text = config.get("text_config") or config
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((text[name] for name in names if text.get(name)), 0)
        return cls(experts, text.get("num_experts_per_tok") or 0 if experts else 0)


async def find_kept(client: ProbeClient, kind: str) -> bool:
    """Return whether an engine reports kept sets: vLLM then refuses requests without top-k."""
    for route in ROUTES[kind].values():
        if route.mode is Mode.EXACT and Feature.KEPT in route.features:
            with contextlib.suppress(*FAULTS):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await client.sample(route(kept=True), 2, top_k=_TOP_K, kept=True)
                    return bool(answer.kept)
    return False


async def check_reports(
    client: ProbeClient, wire: EngineFormat, facts: ModelFacts | None
) -> tuple[int, int] | None:
    """Check what the engine reports; return layers and top-k of experts, None without any.

    With `facts`, the checks are those of `tugline doctor`.
    """
    shape = None
    if Feature.EXPERTS in wire.features:
        shape = await _check_experts(client, wire, facts)
    if Feature.KEPT in wire.features and client.kept:
        passed = await client.attempt(KEPT, _check_kept(client, wire))
        if passed and facts is not None:
            await _recompute_kept(client, wire)
    elif facts is not None and (wire.name, KEPT) in _SETTINGS:
        advice = _SETTINGS[wire.name, KEPT]
        client.note(KEPT, None, "not reported: tokens of truncated sampling are not trained on")
        client.advice.append(f"{KEPT}: for sampling with top_p, top_k or min_p, {advice}")
    return shape


# --------------------------------------------------------------------------- experts
async def _check_experts(
    client: ProbeClient, wire: EngineFormat, facts: ModelFacts | None
) -> tuple[int, int] | None:
    prompt = _make_prompt(client, wire)
    try:
        answer = await client.sample(wire, _COUNT, prompt=prompt, experts=True)
    except FAULTS as error:
        client.note(EXPERTS, False, str(error) or type(error).__name__)
        return None
    known = facts or ModelFacts()
    if answer.experts is None:
        if known.experts:
            _fail(client, wire, "not reported")
        return None
    length = len(prompt) + len(answer.ids) - 1
    shaped = _shape_rows(answer.experts, length, known.top_k)
    rows = shaped[0]
    fault = shaped[1] or _find_fault(rows, length, known)
    if fault is not None:
        _fail(client, wire, fault)
        return None
    layers, top_k = rows.shape[1:]
    detail = f"{length} tokens, {layers} layers, {top_k} experts of a token in each"
    client.note(EXPERTS, True, detail)
    if facts is not None:
        await _check_repeats(client, type(wire)(kept=wire.kept, experts=(layers, top_k)), prompt)
    return layers, top_k


def _make_prompt(client: ProbeClient, wire: EngineFormat) -> Ids:
    """Make a prompt that is long enough for its engine, of ids that the model has."""
    window = client.card.max_model_len
    room = max(2, window - 2 * _COUNT) if window else _LONG
    length = min(_LONG if wire.name == "sglang" else 4 * _COUNT, room)
    return np.random.default_rng(0).choice(client.prompt, length)


def _shape_rows(report: ReportedExperts, length: int, top_k: int) -> tuple[Experts, str | None]:
    """Give rows their shape, which SGLang does not report, or say what is wrong."""
    rows = report.rows
    if rows.shape[:2] != (1, 1) or length == 1:
        return rows, None
    values = rows.size
    if values % length:
        return rows, f"{values} values of {length} tokens, must be as many for each"
    flat = rows.reshape(length, -1)
    if not flat.any():
        return rows, check_experts(flat[:, None])
    if top_k and flat.shape[1] % top_k == 0:
        return flat.reshape(length, -1, top_k), None
    shape = reports.infer_shape(flat)
    if shape is None:
        return rows, f"layers cannot be told apart in {flat.shape[1]} values a token"
    return flat.reshape(length, *shape), None


def _find_fault(rows: Experts, length: int, facts: ModelFacts) -> str | None:
    """Return what is wrong with the experts of `length` tokens; None if nothing is."""
    fault = check_experts(rows)
    if fault is not None:
        return fault
    if len(rows) != length:
        return f"they are of {len(rows)} tokens, must be of {length}: all but the last"
    if facts.top_k and rows.shape[2] != facts.top_k:
        return f"a token has {rows.shape[2]} in a layer, must have {facts.top_k}"
    highest = int(rows.max())
    if facts.experts and highest >= facts.experts:
        return f"expert {highest} is out of range: the model has {facts.experts}"
    return None


def _fail(client: ProbeClient, wire: EngineFormat, fault: str) -> None:
    advice = _SETTINGS.get((wire.name, EXPERTS))
    client.note(EXPERTS, False, f"{fault}; {advice}" if advice else fault)
    if advice:
        client.advice.append(f"{EXPERTS}: {advice}")


async def _check_repeats(client: ProbeClient, wire: EngineFormat, prompt: Ids) -> None:
    """Compare the experts of a prompt that is computed twice, with a cleared cache."""
    path = _FLUSH.get(wire.name)
    if path is None:
        client.note(_REPEATS, None, "the engine has no route that clears its cache")
        return
    computed: list[Experts] = []
    try:
        for _ in range(2):
            status = (await client.engine.post(path, b"{}"))[0]
            if status != 200:
                detail = f"the cache cannot be cleared: {path} answers {status}"
                client.note(_REPEATS, None, detail)
                return
            answer = await client.sample(wire, 1, prompt=prompt, experts=True)
            if answer.experts is None or len(answer.experts.rows) < len(prompt):
                raise EngineError("experts of the prompt are missing")
            computed.append(np.sort(answer.experts.rows[: len(prompt)], axis=2))
    except FAULTS as error:
        client.note(_REPEATS, False, str(error) or type(error).__name__)
        return
    differing = float((computed[0] != computed[1]).any(2).mean())
    detail = f"{differing:.1%} of the tokens' layers differ"
    if differing <= _MOST_CHANGED:
        client.note(_REPEATS, True, detail)
    else:
        client.warn(_REPEATS, f"{detail}: logprobs recomputed without replay will differ, too")


# --------------------------------------------------------------------------- kept sets
async def _check_kept(client: ProbeClient, wire: EngineFormat) -> str:
    """Check sets of a few tokens. Raises `EngineError` if they are wrong."""
    answer = await client.sample(wire, _COUNT, top_k=_TOP_K, kept=True)
    advice = _SETTINGS.get((wire.name, KEPT), "")
    advice = f"; {advice}" if advice else ""
    if len(answer.kept) != len(answer.ids):
        raise EngineError(f"{len(answer.kept)} sets of {len(answer.ids)} tokens{advice}")
    for token, kept in zip(answer.ids, answer.kept, strict=True):
        if token not in kept:
            raise EngineError(f"a set of {len(kept)} ids is without the sampled id {token}{advice}")
    return f"{len(answer.ids)} sets with the sampled ids"


async def _recompute_kept(client: ProbeClient, wire: EngineFormat) -> None:
    """Compare sets with the likeliest ids."""
    try:
        compared = 0
        for kept, listed in await _sample_likeliest(client, wire):
            ranked = sorted(listed.items(), key=lambda item: -item[1])
            if len(ranked) <= _TOP_K or ranked[_TOP_K - 1][1] - ranked[_TOP_K][1] < _CLOSE:
                continue
            expected = {token for token, _ in ranked[:_TOP_K]}
            if set(kept) != expected:
                detail = f"a set is {sorted(kept)}, must be the likeliest {sorted(expected)}"
                client.note(_RECOMPUTED, False, f"{detail}; {_SETTINGS[wire.name, KEPT]}")
                return
            compared += 1
    except FAULTS as error:
        client.note(_RECOMPUTED, None, str(error) or type(error).__name__)
        return
    if compared:
        client.note(_RECOMPUTED, True, f"{compared} sets are the likeliest {_TOP_K} ids")
    else:
        client.note(_RECOMPUTED, None, "the engine reports no top logprobs")


async def _sample_likeliest(
    client: ProbeClient, wire: EngineFormat
) -> list[tuple[list[int], dict[int, float]]]:
    """Sample tokens; return the kept ids and logprobs of the likeliest ids for each."""
    ask = client.make_request(wire, _COUNT, top_k=_TOP_K, kept=True)
    post = wire.build_request(ask)
    body = msgspec.json.decode(b"".join(post.body), type=dict[str, Any])
    body["stream"] = False
    if wire.name == "sglang":
        body["top_logprobs_num"] = _LISTED
    else:
        body["sampling_params"]["logprobs"] = _LISTED
    status, raw = await client.engine.post(post.path, msgspec.json.encode(body))
    if status != 200:
        raise EngineError(f"a request for {_LISTED} top logprobs is answered with {status}")
    return _read_likeliest(raw)


def _read_likeliest(raw: bytes) -> list[tuple[list[int], dict[int, float]]]:
    """Read kept ids, and logprobs of the likeliest ids, for each token of a reply."""
    try:
        reply = msgspec.json.decode(raw)
        if "meta_info" in reply:
            meta = reply["meta_info"]
            listed = meta.get("output_top_logprobs") or []
            pairs = [{token: value for value, token, *_ in each} for each in listed]
            sets = meta["output_token_sampling_mask"]
        else:
            choice = reply["choices"][0]
            content = choice["logprobs"]["content"]
            listed = [each.get("top_logprobs") or [] for each in content]
            pairs = [{top["token_id"]: top["logprob"] for top in each} for each in listed]
            sets = choice["sampling_mask"]
        return list(zip(sets, pairs, strict=False))
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"top logprobs cannot be read: {error}") from error
