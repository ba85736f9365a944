"""Send one request to an engine and read its reply as it comes."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest, Reader, parse_engine_error
from tugline.errors import EngineError
from tugline.web.engine_http import EngineHttp
from tugline.web.sse import read_payloads


async def read_reply(
    http: EngineHttp,
    url: str,
    wire: EngineFormat,
    ask: EngineRequest,
    on_accepted: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Delta]:
    """Send one request to the engine at `url` and yield its reply as it comes.

    `on_accepted` is called once the engine has begun a reply with tokens. A server that cannot
    stream may send its answer as a whole. Raises the engine's error about the request, or
    `EngineError` if the connection is lost.
    """
    post = wire.build_request(ask)
    reader = wire.make_reader()
    finished = False
    try:
        async with http.request(url + post.path, *post.body) as response:
            kind = response.headers.get("content-type", "").partition(";")[0]
            if response.status != 200:
                retry_after = response.headers.get("retry-after")
                raise parse_engine_error(response.status, await response.read(), retry_after)
            if kind == "application/json":
                whole = reader.read_body(await response.read())
                on_accepted()
                for delta in whole:
                    finished = finished or delta.finish is not None
                    yield delta
            elif kind != "text/event-stream":
                start = (await anext(response.chunks(), b""))[:200].decode("utf-8", "replace")
                raise EngineError(
                    f"the engine at {url} answered a streamed request with "
                    f"{kind}, not an event stream: {start}"
                )
            else:
                on_accepted()
                async for payloads in read_payloads(response.chunks()):
                    deltas, failure = _read_events(reader, payloads)
                    for delta in deltas:
                        finished = finished or delta.finish is not None
                        yield delta
                    if failure is not None:
                        raise failure
    except OSError as error:
        msg = f"the connection to the engine at {url} was lost: {error or type(error).__name__}"
        raise EngineError(msg) from error
    if not finished:
        raise EngineError("the engine closed the stream without a finish reason")


def _read_events(
    reader: Reader[Any], payloads: list[bytes]
) -> tuple[list[Delta], EngineError | None]:
    """Read events up to the first invalid one or reported failure; return that failure as well."""
    try:
        return reader.read_events(payloads), None
    except EngineError:
        for position, payload in enumerate(payloads):
            try:
                reader.decode(payload)
            except EngineError as error:  # nothing was added yet: all events are decoded first
                return (reader.read_events(payloads[:position]) if position else []), error
        raise
