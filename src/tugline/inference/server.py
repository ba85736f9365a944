"""The embedded engine over HTTP, in vLLM's shapes: token ids in, token ids out.

``/inference/v1/generate`` takes prompt ids and returns sampled ids with log probabilities and
policy versions; the gateway renders prompts and parses answers. A field that this engine would
have to ignore is refused with a 400 that names it: a sampling parameter that silently does nothing
makes wrong training data (I1).

Invariants: I1 (ids are never rendered again or re-tokenised on the way), I4 (an error before the
first byte is a plain 4xx or 5xx; a client that disconnects aborts its request). No torch here.
"""

import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from tugline.chat.dialects.base import check_refusals
from tugline.errors import ClientGone, EngineError, NotFound, RequestError, TuglineError
from tugline.inference import base
from tugline.types import Logprobs
from tugline.web.serve import Http, Message, Receive, Send
from tugline.web.sse import DONE, encode_event

_MAX_BODY, _BODY_S = 256 << 20, 60.0
"""Bounds of a request body, in bytes and seconds."""


# --------------------------------------------------------------------------- request bodies
T = TypeVar("T", bound=msgspec.Struct)
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request; None is the same as leaving a field out."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 both keep the whole vocabulary."""
    seed: Seed | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """Any number asks for the sampled tokens' log probabilities, and for no others."""
    prompt_logprobs: int | None = None
    """0 asks for the prompt's own log probabilities, for which the prompt is scored separately."""
    # Accepted only with the value that has no effect; see `_NO_EFFECT`.
    n: int | None = None
    stop: str | list[str] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_logprobs: int | None = None
    # About text, which the engine does not produce: any value is accepted.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
}


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/inference/v1/generate``."""

    token_ids: list[TokenId]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    stream: bool = False
    stream_options: Any = None
    """Accepted and ignored: it concerns the layout of chunks only."""
    request_id: str | None = None


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/abort_requests``; no ids means all of them."""

    request_ids: list[str] = []


_FIELD = re.compile(r"field `(\w+)`")
_PATH = re.compile(r"`\$\.?([^`]*)`$")


def parse(raw: bytes, kind: type[T]) -> T:
    """Decode a body. Raises `RequestError` naming the field that is wrong."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.DecodeError as error:
        text = str(error)
        path, field = _PATH.search(text), _FIELD.search(text)
        names = [path[1]] if path and path[1] else []
        names += [field[1]] if field else []
        raise RequestError(f"1 validation error: {text}", param=".".join(names) or None) from error


def to_request(body: GenerateBody, *, window: int, request_id: str) -> base.GenerateRequest:
    """Build the engine's request. Raises `RequestError` for what this engine cannot do."""
    params = body.sampling_params
    check_refusals(params, _NO_EFFECT)
    return base.GenerateRequest(
        prompt_ids=np.array(body.token_ids, np.int32),
        max_tokens=window if params.max_tokens is None else params.max_tokens,
        temperature=1.0 if params.temperature is None else params.temperature,
        top_p=1.0 if params.top_p is None else params.top_p,
        top_k=0 if params.top_k in (None, -1) else int(params.top_k),
        seed=params.seed,
        stop_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        id=request_id,
        stream=body.stream,
    )


# --------------------------------------------------------------------------- routes
def create_app(
    engine: base.GenerationEngine, *, model_name: str
) -> Callable[[Message, Receive, Send], Awaitable[None]]:
    """Create the ASGI app that serves `engine` as the model `model_name`."""
    routes = _Routes(engine, model_name)
    by_path = {
        ("POST", "/inference/v1/generate"): routes.generate,
        ("GET", "/v1/models"): routes.models,
        ("GET", "/health"): routes.health,
        ("GET", "/metrics"): routes.metrics,
        ("POST", "/abort_requests"): routes.abort,
        ("POST", "/inference/v1/abort_requests"): routes.abort,
    }

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        http = Http(scope, receive, send)
        try:
            route = by_path.get((http.method, http.path))
            if route is None:
                raise NotFound(f"{http.method} {http.path} is not served here")
            await route(http)
        except ClientGone:
            return
        except base.CutError:  # unfinished: the server drops the connection
            if not http.started:
                await http.stream("application/json")
        except (RequestError, EngineError) as error:
            if http.started:
                await http.end(encode_event(error_body(error, 500)))
                return
            status, headers = error.status or 500, {}
            if isinstance(error, EngineError) and error.retry_after is not None:
                headers["retry-after"] = f"{error.retry_after:g}"
            await http.reply(status, error_body(error, status), headers)

    return app


class _Routes:
    def __init__(self, engine: base.GenerationEngine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    # ----------------------------------------------------------------- answers
    async def generate(self, http: Http) -> None:
        """Sample an answer to prompt ids; a client that hangs up aborts it."""
        body = parse(await http.body(_MAX_BODY, _BODY_S), GenerateBody)
        if body.model is not None and body.model != self._model:
            msg = f"The model `{body.model}` does not exist. Valid aliases: {self._model}."
            raise NotFound(msg, param="model")
        if body.stream and body.sampling_params.prompt_logprobs is not None:
            msg = "prompt_logprobs=0 is served with stream=false only"
            raise RequestError(msg, param="prompt_logprobs")
        window = self._engine.max_model_len
        name = body.request_id or uuid.uuid4().hex
        generation = to_request(body, window=window, request_id=name)
        answer = self._stream_events if body.stream else self._send_whole
        async with http.while_connected():
            await answer(http, generation, body)

    async def _send_whole(
        self, http: Http, generation: base.GenerateRequest, body: GenerateBody
    ) -> None:
        params = body.sampling_params
        scores = None
        if params.prompt_logprobs is not None:
            values = await self._engine.score(generation.prompt_ids, generation.temperature)
            scores = prompt_logprobs(body.token_ids, values)
        async with aclosing(self._engine.generate(generation)) as chunks:
            whole = base.join([chunk async for chunk in chunks])
        answer = self._head(generation) | {
            "choices": [_choice(whole, with_logprobs=params.logprobs is not None)],
            "usage": _usage(generation, len(whole.ids)),
            "prompt_token_ids": None,
            "prompt_logprobs": scores,
            "output_mode": "tokens",
        }
        await http.reply(200, msgspec.json.encode(answer))

    async def _stream_events(
        self, http: Http, generation: base.GenerateRequest, body: GenerateBody
    ) -> None:
        head = self._head(generation)
        with_logprobs = body.sampling_params.logprobs is not None
        count = 0
        async with aclosing(self._engine.generate(generation)) as chunks:
            async for chunk in chunks:
                if not http.started:
                    await http.stream("text/event-stream")
                count += len(chunk.ids)
                choice = _choice(chunk, with_logprobs=with_logprobs)
                await http.write(_event(head | {"choices": [choice]}))
        usage = _event(head | {"choices": [], "usage": _usage(generation, count)})
        await http.end(usage + encode_event(DONE))

    def _head(self, generation: base.GenerateRequest) -> dict[str, object]:
        return {"request_id": f"generate-tokens-{generation.id}", "model": self._model}

    # ----------------------------------------------------------------- about the engine
    async def models(self, http: Http) -> None:
        """Describe the one model: its window, and what its log probabilities mean."""
        model = {
            "id": self._model,
            "object": "model",
            "owned_by": "tugline",
            "root": self._model,
            "max_model_len": self._engine.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "weight_version": str(self._engine.version),
        }
        await http.reply(200, msgspec.json.encode({"object": "list", "data": [model]}))

    async def health(self, http: Http) -> None:
        """200 while the engine answers, 503 once it is down."""
        await http.reply(503 if self._engine.down else 200, b"")

    async def metrics(self, http: Http) -> None:
        """Prometheus text."""
        text = metrics_text(self._engine.stats(), self._model)
        await http.reply(200, text.encode(), {"content-type": "text/plain; charset=utf-8"})

    async def abort(self, http: Http) -> None:
        """End requests by their `request_id`."""
        body = parse(await http.body(_MAX_BODY, _BODY_S), AbortBody)
        answer = {"status": "aborted", "aborted": await self._engine.abort(body.request_ids)}
        await http.reply(200, msgspec.json.encode(answer))


def _event(value: object) -> bytes:
    return encode_event(msgspec.json.encode(value))


def _choice(chunk: base.SampledChunk, *, with_logprobs: bool) -> dict[str, Any]:
    pairs = zip(chunk.ids.tolist(), chunk.logprobs.tolist(), strict=True)
    content = [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
    versions = [
        {"version": str(span.version), "start": span.start, "end": span.end}
        for span in chunk.versions
    ]
    return {
        "index": 0,
        "finish_reason": chunk.finish,
        "stop_reason": chunk.stop_id,
        "token_ids": chunk.ids.tolist(),
        "logprobs": {"content": content} if with_logprobs else None,
        "weight_versions": versions,
    }


def _usage(generation: base.GenerateRequest, count: int) -> dict[str, int]:
    prompt = len(generation.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def metrics_text(stats: base.EngineStats, model: str) -> str:
    """Render the counters as Prometheus text, with vLLM's names and the prefix ``tugline:``."""
    label = f'model_name="{model}"'
    rows: list[tuple[str, str, str, float]] = [
        ("num_requests_running", "gauge", label, stats.running),
        ("num_requests_waiting", "gauge", label, stats.waiting),
        ("num_sequences_parked", "gauge", label, stats.parked),
        ("prompt_tokens_total", "counter", label, stats.prompt_tokens),
        ("prefix_cache_hits_total", "counter", label, stats.reused_tokens),
        ("generation_tokens_total", "counter", label, stats.sampled_tokens),
        ("forward_seconds_total", "counter", label, stats.busy_s),
        ("forward_passes_total", "counter", label, stats.steps),
    ]
    rows += [
        ("request_success_total", "counter", f'{label},finished_reason="{reason}"', count)
        for reason, count in stats.finished.items()
    ]
    lines: list[str] = []
    for name, kind, labels, value in rows:
        header = f"# TYPE tugline:{name} {kind}"
        if header not in lines:
            lines.append(header)
        lines.append(f"tugline:{name}{{{labels}}} {value:g}")
    return "\n".join(lines) + "\n"


def prompt_logprobs(ids: list[int], logprobs: Logprobs) -> list[dict[str, dict[str, float]] | None]:
    """Log probabilities of a prompt in vLLM's shape; the first id has none."""
    pairs = zip(ids[1:], logprobs.tolist(), strict=True)
    return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


def error_body(error: TuglineError, status: int) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    param = error.param if isinstance(error, RequestError) else None
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": _TYPES.get(status, "InternalServerError"),
                "param": param,
                "code": status,
            }
        }
    )
