"""Talk to the inference engine: ask for tokens, read them as they are sampled, give up in time.

Faults before the first token are retried a bounded number of times; after it, the caller decides,
because the tokens are already somebody's answer. Leaving the iterator closes the connection, which
aborts the request on the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from tugline.errors import EngineError
from tugline.gateway.engines.base import Delta, Draw, EngineFormat

_TRIES = 3
_BACKOFF_S = 0.25
_RETRIED = frozenset({429, 500, 502, 503, 504})


class ModelCard(msgspec.Struct, frozen=True):
    """What the engine serves: its name and its context window in tokens."""

    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[ModelCard]


class Upstream:
    """One engine replica behind a connection pool."""

    def __init__(self, url: str, wire: EngineFormat, *, idle_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.wire = wire
        self._timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=idle_s)
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._client = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, read_bufsize=1 << 20
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def model(self) -> ModelCard:
        """The first model that the engine serves."""
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise self.wire.error(response.status, body, None)
                return msgspec.json.decode(body, type=_Models).data[0]
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, IndexError) as error:
            msg = f"no usable engine at {self.url}: {error}; start it or mend its address"
            raise EngineError(msg) from error

    async def sample(self, draw: Draw) -> AsyncGenerator[Delta]:
        """Tokens as they come. Raises `EngineError`; close the iterator to abort."""
        body = self.wire.body(draw)
        for attempt in range(_TRIES):
            began = False
            try:
                async with contextlib.aclosing(self._once(body)) as deltas:
                    async for delta in deltas:
                        began = True
                        yield delta
            except EngineError as error:
                final = error.status is not None and error.status not in _RETRIED
                if began or final or attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(error.retry_after or _BACKOFF_S * 2**attempt)
            else:
                return

    async def _once(self, body: bytes) -> AsyncGenerator[Delta]:
        try:
            async with self._session.post(
                self.url + self.wire.generate_path,
                data=body,
                headers={"content-type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise self.wire.error(
                        response.status,
                        await response.read(),
                        response.headers.get("retry-after"),
                    )
                finished = False
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    for delta in self.wire.deltas(data):
                        finished = finished or delta.finish is not None
                        yield delta
                if not finished:
                    msg = "the engine closed the stream without a finish reason"
                    raise EngineError(msg)
        except (aiohttp.ClientError, TimeoutError) as error:
            msg = f"the engine at {self.url} was lost: {error or type(error).__name__}"
            raise EngineError(msg) from error

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            msg = "the upstream is not open; enter it with `async with`"
            raise EngineError(msg)
        return self._client
