"""The embedded engine over HTTP, in vLLM's shapes: token ids in, token ids out.

``/inference/v1/generate`` takes prompt ids and returns sampled ids with log probabilities and
policy versions; the gateway renders prompts and parses answers.

Invariants: I1 (ids are never rendered again or re-tokenised on the way), I4 (an error before the
first byte is a plain 4xx or 5xx; a client that disconnects aborts its request). No torch here.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast, get_args

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tugline.errors import EngineError, NotFound, RequestError
from tugline.inference import base, wire
from tugline.web import sse
from tugline.web.sse import encode_event

DONE = encode_event(sse.DONE)


def create_app(engine: base.GenerationEngine, *, model_name: str) -> Starlette:
    """Create the ASGI app that serves `engine` as the model `model_name`."""
    routes = _Routes(engine, model_name)
    return Starlette(
        routes=[
            Route("/inference/v1/generate", _answer_errors(routes.generate), methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/pause", _answer_errors(routes.pause), methods=["POST"]),
            Route("/resume", _answer_errors(routes.resume), methods=["POST"]),
            Route("/is_paused", routes.is_paused),
            Route("/abort_requests", _answer_errors(routes.abort), methods=["POST"]),
            Route("/inference/v1/abort_requests", _answer_errors(routes.abort), methods=["POST"]),
        ]
    )


Endpoint = Callable[[Request], Awaitable[Response]]


def _answer_errors(endpoint: Endpoint) -> Endpoint:
    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (RequestError, EngineError) as error:
            return wire.error_response(error)

    return guarded


class _Routes:
    def __init__(self, engine: base.GenerationEngine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    # ----------------------------------------------------------------- answers
    async def generate(self, request: Request) -> Response:
        """Sample an answer to prompt ids."""
        body = wire.parse(await request.body(), wire.GenerateBody)
        if body.model is not None and body.model != self._model:
            msg = f"The model `{body.model}` does not exist. Valid aliases: {self._model}."
            raise NotFound(msg, param="model")
        if body.stream and body.sampling_params.prompt_logprobs is not None:
            msg = "prompt_logprobs=0 is served with stream=false only"
            raise RequestError(msg, param="prompt_logprobs")
        window = self._engine.max_model_len
        name = body.request_id or uuid.uuid4().hex
        generation = wire.to_request(body, window=window, request_id=name)
        base.check(generation, max_model_len=window, vocab_size=self._engine.vocab_size)
        pieces = self._stream_events if body.stream else self._whole_answer
        return _Pieces(pieces(generation, body), stream=body.stream)

    async def _whole_answer(
        self, generation: base.GenerateRequest, body: wire.GenerateBody
    ) -> AsyncGenerator[bytes, None]:
        params = body.sampling_params
        scores = None
        if params.prompt_logprobs is not None:
            values = await self._engine.score(generation.prompt_ids, generation.temperature)
            scores = wire.prompt_logprobs(body.token_ids, values)
        async with aclosing(self._engine.generate(generation)) as chunks:
            whole = base.join([chunk async for chunk in chunks])
        yield msgspec.json.encode(
            self._head(generation)
            | {
                "choices": [_choice(whole, with_logprobs=params.logprobs is not None)],
                "usage": _usage(generation, len(whole.ids)),
                "prompt_token_ids": None,
                "prompt_logprobs": scores,
                "output_mode": "tokens",
            }
        )

    async def _stream_events(
        self, generation: base.GenerateRequest, body: wire.GenerateBody
    ) -> AsyncGenerator[bytes, None]:
        head = self._head(generation)
        with_logprobs = body.sampling_params.logprobs is not None
        count = 0
        async with aclosing(self._engine.generate(generation)) as chunks:
            async for chunk in chunks:
                count += len(chunk.ids)
                yield _event(head | {"choices": [_choice(chunk, with_logprobs=with_logprobs)]})
        yield _event(head | {"choices": [], "usage": _usage(generation, count)})
        yield DONE

    def _head(self, generation: base.GenerateRequest) -> dict[str, object]:
        return {"request_id": f"generate-tokens-{generation.id}", "model": self._model}

    # ----------------------------------------------------------------- about the engine
    async def models(self, _: Request) -> Response:
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
        return _json({"object": "list", "data": [model]})

    async def health(self, _: Request) -> Response:
        """200 while the engine answers, 503 once it is down."""
        return Response(status_code=503 if self._engine.down else 200)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        return PlainTextResponse(metrics_text(self._engine.stats(), self._model))

    async def pause(self, request: Request) -> Response:
        """Hold new requests; `mode` is as in vLLM, and so is its default."""
        mode = request.query_params.get("mode", "abort")
        if mode not in get_args(base.Mode):
            msg = f"mode={mode!r} must be one of {', '.join(get_args(base.Mode))}"
            raise RequestError(msg, param="mode")
        await self._engine.pause(cast("base.Mode", mode))
        return _json({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        """Serve requests again."""
        await self._engine.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        """Whether new requests are held."""
        return _json({"is_paused": self._engine.paused})

    async def abort(self, request: Request) -> Response:
        """End requests by their `request_id`."""
        body = wire.parse(await request.body(), wire.AbortBody)
        return _json({"status": "aborted", "aborted": await self._engine.abort(body.request_ids)})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


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


# --------------------------------------------------------------------------- responses in pieces
_NEVER_REACHED = "1000000000"
"""Content length announced for an answer that a scripted fault will cut off."""


class _Pieces(Response):
    """Send what `pieces` yields, headers with the first one; a disconnect closes the iterator.

    An error before the first piece becomes a plain error response, never a broken stream (I4).
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], *, stream: bool) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._pieces = pieces
        self._stream = stream
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Race the answer against the client's disconnect."""
        answer = asyncio.create_task(self._send_all(scope, receive, send))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            disconnect.cancel()
            await asyncio.gather(answer, disconnect, return_exceptions=True)
        if not answer.cancelled():
            answer.result()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces):
                async for piece in self._pieces:
                    await self._send(send, piece)
        except base.CutError:
            if not self._started:
                await self._start(send, length=_NEVER_REACHED)
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            return  # unfinished: the server drops the connection
        except (EngineError, RequestError) as error:
            if not self._started:
                await wire.error_response(error)(scope, receive, send)
                return
            await self._send(send, encode_event(wire.error_body(error, 500)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send, length: str | None = None) -> None:
        self._started = True
        kind = str(self.media_type).encode()
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        if length:
            headers.append((b"content-length", length.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, piece: bytes) -> None:
        if not self._started:
            await self._start(send, None if self._stream else str(len(piece)))
        await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
