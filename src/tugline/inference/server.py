"""HTTP server of the embedded engine, with vLLM's API for token ids.

``/inference/v1/generate`` takes prompt ids and returns sampled ids with log probabilities and
policy versions; the gateway renders prompts and parses answers. A field that the engine cannot
apply is rejected with a 400 that names the field: a sampling parameter that is silently ignored
would give wrong training data (I1).

Invariants: I1 (ids are never rendered or tokenised again), I4 (an error before the first byte is a
plain 4xx or 5xx; a client that disconnects aborts its request). This module does not import torch.
"""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tugline.chat.dialects.decoding import decode
from tugline.chat.engines.reports import encode_experts
from tugline.errors import ClientGone, EngineError, NotFound, RequestError, TuglineError
from tugline.inference import base
from tugline.schema import copy_fields
from tugline.types import Logprobs
from tugline.web.http import Http, Message, Receive, Send
from tugline.web.sse import DONE, encode_event

_MAX_BODY = 256 << 20
"""Maximum size of a request body in bytes."""
_BODY_S = 60.0
"""Maximum seconds to wait for a request body."""


# --------------------------------------------------------------------------- request bodies
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    """0 and -1 both keep the whole vocabulary."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: int = 0
    """Accepted and ignored: the sampled tokens' log probabilities are always sent, no others."""
    prompt_logprobs: Literal[0] | None = None
    """0 requests the log probabilities of the prompt, which is scored separately."""
    min_p: float = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] = 1.0
    """Sent by the gateway to every engine; only 1 is accepted."""
    stream_interval: Annotated[int, Meta(ge=1)] = 1
    """Tokens of an event of a stream; the first event has one, and the last the rest."""


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/inference/v1/generate``."""

    token_ids: list[TokenId]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    stream: bool = False
    request_id: str | None = None

    def build_request(self, window: int) -> base.GenerateRequest:
        """Build the engine's request."""
        params = self.sampling_params
        return copy_fields(
            base.GenerateRequest,
            params,
            prompt_ids=np.array(self.token_ids, np.int32),
            max_tokens=window if params.max_tokens is None else params.max_tokens,
            top_k=max(0, params.top_k),
            stop_ids=tuple(params.stop_token_ids),
            id=self.request_id or uuid.uuid4().hex,
            stream=self.stream,
        )


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/abort_requests``; without ids, all requests are aborted."""

    request_ids: list[str] = []


_generate = msgspec.json.Decoder(GenerateBody)
_abort = msgspec.json.Decoder(AbortBody)


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
    }

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        http = Http(scope, receive, send)
        try:
            route = by_path.get((http.method, http.path))
            if route is None:
                raise NotFound(f"{http.method} {http.path} is not a route")
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
            status = error.status or 500
            headers = {}
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
        """Sample an answer to prompt ids; a client that disconnects aborts it."""
        raw = await http.body(_MAX_BODY, _BODY_S)
        body = decode(raw, _generate, "the request body")
        if body.model is not None and body.model != self._model:
            msg = f"The model `{body.model}` does not exist. Valid aliases: {self._model}."
            raise NotFound(msg, param="model")
        scored = body.sampling_params.prompt_logprobs is not None
        if body.stream and scored:
            msg = "prompt_logprobs=0 requires stream=false"
            raise RequestError(msg, param="prompt_logprobs")
        request = body.build_request(self._engine.max_model_len)
        head: dict[str, Any] = {"request_id": f"generate-tokens-{request.id}", "model": self._model}
        with http.while_connected():
            if scored:
                values = await self._engine.score(request.prompt_ids, request.temperature)
                head["prompt_logprobs"] = prompt_logprobs(body.token_ids, values)
            async with aclosing(self._engine.generate(request)) as chunks:
                if body.stream:
                    await _stream_events(http, head, chunks)
                else:
                    whole = base.join([chunk async for chunk in chunks])
                    answer = head | {"choices": [_choice(whole)]}
                    await http.reply(200, msgspec.json.encode(answer))

    # ----------------------------------------------------------------- about the engine
    async def models(self, http: Http) -> None:
        """Describe the model: context window, mode of log probabilities, weight version."""
        model = {
            "id": self._model,
            "object": "model",
            "owned_by": "tugline",
            "max_model_len": self._engine.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "weight_version": str(self._engine.version),
        }
        await http.reply(200, msgspec.json.encode({"object": "list", "data": [model]}))

    async def health(self, http: Http) -> None:
        """Reply with 200 while the engine is up, with 503 once it is down."""
        await http.reply(503 if self._engine.down else 200, b"")

    async def metrics(self, http: Http) -> None:
        """Reply with the counters as Prometheus text."""
        text = metrics_text(self._engine.stats(), self._model)
        await http.reply(200, text.encode(), {"content-type": "text/plain; charset=utf-8"})

    async def abort(self, http: Http) -> None:
        """Abort requests by their `request_id`."""
        raw = await http.body(_MAX_BODY, _BODY_S)
        body = decode(raw or b"{}", _abort, "the request body")
        answer = {"status": "aborted", "aborted": await self._engine.abort(body.request_ids)}
        await http.reply(200, msgspec.json.encode(answer))


async def _stream_events(
    http: Http, head: dict[str, Any], chunks: AsyncGenerator[base.SampledChunk]
) -> None:
    async for chunk in chunks:
        if not http.started:
            await http.stream("text/event-stream")
        event = head | {"choices": [_choice(chunk)]}
        await http.write(encode_event(msgspec.json.encode(event)))
    await http.end(encode_event(DONE))


def _choice(chunk: base.SampledChunk) -> dict[str, Any]:
    ids = chunk.ids.tolist()
    pairs = zip(ids, chunk.logprobs.tolist(), strict=True)
    choice = {
        "index": 0,
        "finish_reason": chunk.finish,
        "stop_reason": chunk.stop_id,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": i, "logprob": logprob} for i, logprob in pairs]},
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end}
            for span in chunk.versions
        ],
    }
    if chunk.experts is not None:
        choice["routed_experts"] = encode_experts(chunk.experts)
        choice["routed_experts_start"] = chunk.experts_start
    if chunk.kept is not None:
        choice["sampling_mask"] = [kept.tolist() for kept in chunk.kept]
    return choice


_METRICS = {
    "running": "num_requests_running gauge",
    "waiting": "num_requests_waiting gauge",
    "parked": "num_sequences_parked gauge",
    "prompt_tokens": "prompt_tokens_total counter",
    "reused_tokens": "prefix_cache_hits_total counter",
    "sampled_tokens": "generation_tokens_total counter",
    "busy_s": "forward_seconds_total counter",
    "steps": "forward_passes_total counter",
}
"""Name (vLLM's where one exists) and type of each counter."""


def metrics_text(stats: base.EngineStats, model: str) -> str:
    """Render the counters as Prometheus text, under names that begin with ``tugline:``."""
    label = f'model_name="{model}"'
    values = msgspec.structs.asdict(stats)
    lines: list[str] = []
    for field, metric in _METRICS.items():
        name = metric.partition(" ")[0]
        lines += [f"# TYPE tugline:{metric}", f"tugline:{name}{{{label}}} {values[field]:g}"]
    lines.append("# TYPE tugline:request_success_total counter")
    for reason, count in stats.finished.items():
        lines.append(f'tugline:request_success_total{{{label},finished_reason="{reason}"}} {count}')
    return "\n".join(lines) + "\n"


def prompt_logprobs(ids: list[int], logprobs: Logprobs) -> list[dict[str, dict[str, float]] | None]:
    """Return the log probabilities of a prompt in vLLM's format; None for the first id."""
    pairs = zip(ids[1:], logprobs.tolist(), strict=True)
    return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


def error_body(error: TuglineError, status: int) -> bytes:
    """Return the JSON body of an error: ``{"error": {message, type, param, code}}``."""
    param = error.param if isinstance(error, RequestError) else None
    kind = _TYPES.get(status, "InternalServerError")
    fields = {"message": str(error), "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": fields})
