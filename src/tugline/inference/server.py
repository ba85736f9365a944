"""The embedded engine over HTTP, in vLLM's shapes, so that a gateway needs one way to ask.

``/inference/v1/generate`` is the exact route: ids in, ids with log probabilities and policy
versions out. ``/v1/completions`` and ``/v1/chat/completions`` serve ordinary clients and carry the
same ids when asked (`return_token_ids`).

Invariants: I1 (ids are never rendered again or re-tokenised on the way), I4 (errors before the
first byte are plain 4xx/5xx; a hang-up aborts the request). No torch here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast, get_args

import msgspec
from renderers import Qwen3RendererConfig, Renderer, Tokenizer, create_renderer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tugline.errors import RequestError
from tugline.inference.base import (
    Chunk,
    GenerateRequest,
    GenerationEngine,
    Mode,
    check,
    join,
)
from tugline.inference.chat import Chat, Deltas
from tugline.inference.metrics import metrics_text
from tugline.inference.streaming import Pieces
from tugline.inference.wire import (
    AbortBody,
    ChatBody,
    CompletionBody,
    GenerateBody,
    Knobs,
    error_response,
    ids_array,
    parse,
    prompt_logprobs,
    to_request,
)
from tugline.types import Finish, Ids, Logprobs

DONE = b"data: [DONE]\n\n"


class NotFound(RequestError):
    """No such model."""

    status = 404


def create_app(
    engine: GenerationEngine,
    *,
    model_name: str,
    tokenizer: Tokenizer | None = None,
    renderer: Renderer | None = None,
) -> Starlette:
    """The ASGI app. Without `tokenizer` only ids are served; `renderer` defaults to Qwen3's."""
    if tokenizer is not None and renderer is None:
        renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    chat = Chat(tokenizer, renderer) if tokenizer is not None and renderer is not None else None
    routes = _Routes(engine, model_name, tokenizer, chat)
    return Starlette(
        routes=[
            Route("/inference/v1/generate", _safe(routes.generate), methods=["POST"]),
            Route("/v1/completions", _safe(routes.completions), methods=["POST"]),
            Route("/v1/chat/completions", _safe(routes.chat_completions), methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/pause", _safe(routes.pause), methods=["POST"]),
            Route("/resume", _safe(routes.resume), methods=["POST"]),
            Route("/is_paused", routes.is_paused),
            Route("/abort_requests", _safe(routes.abort), methods=["POST"]),
            Route("/inference/v1/abort_requests", _safe(routes.abort), methods=["POST"]),
        ]
    )


Endpoint = Callable[[Request], Awaitable[Response]]


def _safe(endpoint: Endpoint) -> Endpoint:
    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            return error_response(error)

    return guarded


class _Routes:
    def __init__(
        self,
        engine: GenerationEngine,
        model_name: str,
        tokenizer: Tokenizer | None,
        chat: Chat | None,
    ) -> None:
        self._engine = engine
        self._model = model_name
        self._tokenizer = tokenizer
        self._chat = chat

    # ----------------------------------------------------------------- answers
    async def generate(self, request: Request) -> Response:
        """Ids in, ids out."""
        body = parse(await request.body(), GenerateBody)
        self._check_model(body.model)
        name = body.request_id or uuid.uuid4().hex
        asked = self._ask(ids_array(body.token_ids), body.sampling_params, name, body.stream)
        with_logprobs = body.sampling_params.logprobs is not None
        pieces = self._generate_stream if body.stream else self._generate_whole
        return Pieces(pieces(asked, with_logprobs=with_logprobs), stream=body.stream)

    async def _generate_whole(
        self, asked: GenerateRequest, *, with_logprobs: bool
    ) -> AsyncGenerator[bytes, None]:
        whole = await self._whole(asked)
        yield msgspec.json.encode(
            {
                "request_id": f"generate-tokens-{asked.id}",
                "model": self._model,
                "choices": [_choice(whole, with_logprobs=with_logprobs)],
                "usage": _usage(asked, len(whole.ids)),
                "prompt_token_ids": None,
                "prompt_logprobs": None,
                "output_mode": "tokens",
            }
        )

    async def _generate_stream(
        self, asked: GenerateRequest, *, with_logprobs: bool
    ) -> AsyncGenerator[bytes, None]:
        head: dict[str, object] = {
            "request_id": f"generate-tokens-{asked.id}",
            "model": self._model,
        }
        count = 0
        async with aclosing(self._engine.generate(asked)) as chunks:
            async for chunk in chunks:
                count += len(chunk.ids)
                yield _event(head | {"choices": [_choice(chunk, with_logprobs=with_logprobs)]})
        yield _event(head | {"choices": [], "usage": _usage(asked, count)})
        yield DONE

    async def completions(self, request: Request) -> Response:
        """One prompt continued; the answer's text needs a tokenizer."""
        body = parse(await request.body(), CompletionBody)
        self._check_model(body.model)
        if body.stream:
            msg = "stream=True is not served on /v1/completions; use /inference/v1/generate"
            raise RequestError(msg, param="stream")
        name = body.request_id or uuid.uuid4().hex
        if isinstance(body.prompt, str):
            ids = ids_array(self._tokens().encode(body.prompt, add_special_tokens=False))
        else:
            ids = ids_array(body.prompt)
        scored = body.prompt_logprobs == 0
        if scored:
            body = msgspec.structs.replace(body, prompt_logprobs=None)
        asked = self._ask(ids, body, name, stream=False)
        scores = await self._engine.score(ids, asked.temperature) if scored else None
        return Pieces(self._completion(asked, body, scores), stream=False)

    async def _completion(
        self, asked: GenerateRequest, body: CompletionBody, scores: Logprobs | None
    ) -> AsyncGenerator[bytes, None]:
        whole = await self._whole(asked)
        text = "" if self._tokenizer is None else self._tokenizer.decode(whole.ids.tolist())
        choice = _choice(whole, with_logprobs=False) | {
            "text": text,
            "logprobs": None
            if body.logprobs is None
            else {"token_logprobs": whole.logprobs.tolist()},
        }
        if body.return_token_ids:
            choice["prompt_token_ids"] = asked.prompt_ids.tolist()
        else:
            choice["token_ids"] = None
        if scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs(asked.prompt_ids, scores)
        yield msgspec.json.encode(
            self._head("text_completion", f"cmpl-{asked.id}")
            | {"choices": [choice], "usage": _usage(asked, len(whole.ids))}
        )

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI Chat, rendered and parsed by the renderer."""
        body = parse(await request.body(), ChatBody)
        self._check_model(body.model)
        if self._chat is None:
            msg = "this server was started without a tokenizer: use /inference/v1/generate"
            raise RequestError(msg, param="messages")
        ids = self._chat.prompt(body)
        name = body.request_id or uuid.uuid4().hex
        asked = self._ask(ids, body, name, body.stream, self._chat.stop_ids)
        pieces = self._chat_stream if body.stream else self._chat_whole
        return Pieces(pieces(self._chat, asked, body), stream=body.stream)

    async def _chat_whole(
        self, chat: Chat, asked: GenerateRequest, body: ChatBody
    ) -> AsyncGenerator[bytes, None]:
        whole = await self._whole(asked)
        message = chat.message(asked.prompt_ids, whole.ids, body)
        choice = self._chat_choice(whole, body, called="tool_calls" in message)
        answer = self._head("chat.completion", f"chatcmpl-{asked.id}") | {
            "choices": [choice | {"message": message}],
            "usage": _usage(asked, len(whole.ids)),
        }
        if body.return_token_ids:
            answer["prompt_token_ids"] = asked.prompt_ids.tolist()
        yield msgspec.json.encode(answer)

    async def _chat_stream(
        self, chat: Chat, asked: GenerateRequest, body: ChatBody
    ) -> AsyncGenerator[bytes, None]:
        head = self._head("chat.completion.chunk", f"chatcmpl-{asked.id}")
        deltas = Deltas(chat, asked.prompt_ids, body)
        count = 0
        async with aclosing(self._engine.generate(asked)) as chunks:
            async for chunk in chunks:
                if not count:
                    yield _event(head | _opening(asked, body))
                count += len(chunk.ids)
                delta = deltas.push(chunk.ids, last=chunk.finish is not None)
                choice = self._chat_choice(chunk, body, called=deltas.called)
                yield _event(head | {"choices": [choice | {"delta": delta}]})
        if body.stream_options and body.stream_options.include_usage:
            yield _event(head | {"choices": [], "usage": _usage(asked, count)})
        yield DONE

    def _chat_choice(self, chunk: Chunk, body: ChatBody, *, called: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "tool_calls"
            if called and chunk.finish == Finish.STOP
            else chunk.finish,
            "stop_reason": chunk.stop_id,
            "logprobs": self._chat_logprobs(chunk) if body.logprobs else None,
        }
        if body.return_token_ids:
            choice |= {"token_ids": chunk.ids.tolist(), "weight_versions": _versions(chunk)}
        return choice

    def _chat_logprobs(self, chunk: Chunk) -> dict[str, Any]:
        content = []
        for token, logprob in zip(chunk.ids.tolist(), chunk.logprobs.tolist(), strict=True):
            text = self._tokens().decode([token])
            content.append(
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content}

    # ----------------------------------------------------------------- what they share
    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            msg = f"The model `{model}` does not exist. Valid aliases: {self._model}."
            raise NotFound(msg, param="model")

    def _tokens(self) -> Tokenizer:
        if self._tokenizer is None:
            msg = "this server was started without a tokenizer: send token ids as `prompt`"
            raise RequestError(msg, param="prompt")
        return self._tokenizer

    def _ask(
        self,
        ids: Ids,
        knobs: Knobs,
        name: str,
        stream: bool,  # noqa: FBT001 - as the body has it
        stops: tuple[int, ...] = (),
    ) -> GenerateRequest:
        window = self._engine.max_model_len
        asked = to_request(ids, knobs, window=window, request_id=name, stream=stream, stops=stops)
        check(asked, max_model_len=window, vocab_size=self._engine.vocab_size)
        return asked

    async def _whole(self, asked: GenerateRequest) -> Chunk:
        async with aclosing(self._engine.generate(asked)) as chunks:
            parts = [chunk async for chunk in chunks]
        return join(parts)

    def _head(self, kind: str, name: str) -> dict[str, Any]:
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._model}

    # ----------------------------------------------------------------- about the engine
    async def models(self, _: Request) -> Response:
        """The one model, its window, and what its log probabilities mean."""
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
        """200 while the engine answers."""
        return Response(status_code=503 if self._engine.down else 200)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        return PlainTextResponse(metrics_text(self._engine.stats(), self._model))

    async def pause(self, request: Request) -> Response:
        """Stop and hold new requests; `mode` is as in vLLM, and so is its default."""
        mode = request.query_params.get("mode", "abort")
        if mode not in get_args(Mode):
            msg = f"mode={mode!r} must be one of {', '.join(get_args(Mode))}"
            raise RequestError(msg, param="mode")
        await self._engine.pause(cast("Mode", mode))
        return _json({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        """Go on."""
        await self._engine.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        """Whether new requests are held."""
        return _json({"is_paused": self._engine.paused})

    async def abort(self, request: Request) -> Response:
        """End requests by the `request_id` they came with."""
        body = parse(await request.body(), AbortBody)
        return _json({"status": "aborted", "aborted": await self._engine.abort(body.request_ids)})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _opening(asked: GenerateRequest, body: ChatBody) -> dict[str, Any]:
    """The first chunk: who speaks, and the prompt's ids when asked for."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    ids = {"prompt_token_ids": asked.prompt_ids.tolist()} if body.return_token_ids else {}
    return {"choices": [choice], **ids}


def _choice(chunk: Chunk, *, with_logprobs: bool) -> dict[str, Any]:
    pairs = zip(chunk.ids.tolist(), chunk.logprobs.tolist(), strict=True)
    content = [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
    return {
        "index": 0,
        "finish_reason": chunk.finish,
        "stop_reason": chunk.stop_id,
        "token_ids": chunk.ids.tolist(),
        "logprobs": {"content": content} if with_logprobs else None,
        "weight_versions": _versions(chunk),
    }


def _versions(chunk: Chunk) -> list[dict[str, Any]]:
    return [
        {"version": str(span.version), "start": span.start, "end": span.end}
        for span in chunk.versions
    ]


def _usage(asked: GenerateRequest, count: int) -> dict[str, int]:
    prompt = len(asked.prompt_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
    }
