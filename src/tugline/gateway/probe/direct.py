"""One engine asked directly: no retries, no replicas, nothing recorded. What the doctor uses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np

from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest
from tugline.errors import EngineError, UsageError
from tugline.types import Ids

PATIENCE_S = 120.0
"""For one answer: the first of a fresh engine may take half a minute."""


class Card(msgspec.Struct):
    """What ``/v1/models`` says of one model."""

    id: str
    max_model_len: int = 0
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[Card]


@dataclass(slots=True)
class Answer:
    """All that came of one request."""

    deltas: list[Delta] = field(default_factory=list)
    reads: int = 0

    @property
    def ids(self) -> Ids:
        """All sampled ids."""
        return np.concatenate([np.empty(0, np.int32), *(delta.ids for delta in self.deltas)])

    @property
    def logprobs(self) -> list[float]:
        """One number for each of them."""
        return [float(value) for delta in self.deltas for value in delta.logprobs]

    @property
    def unreported_tokens(self) -> int:
        """Sampled tokens without an id."""
        return sum(delta.unreported_tokens for delta in self.deltas)

    @property
    def prompt(self) -> bytes | None:
        """The prompt's ids as the engine wrote them."""
        return next((delta.prompt for delta in self.deltas if delta.prompt is not None), None)


class Direct:
    """One engine's address and a connection pool."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S, connect=10)
        self._client = aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def client(self) -> aiohttp.ClientSession:
        """The pool. Raises `EngineError` outside the block."""
        if self._client is None:
            msg = "the engine's connections are not open; enter it with `async with`"
            raise EngineError(msg)
        return self._client

    async def card(self, model: str | None) -> Card:
        """The model asked for, or the first."""
        try:
            async with self.client.get(f"{self.url}/v1/models") as response:
                body = await response.read()
            cards = msgspec.json.decode(body, type=_Models).data
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            reason = str(error) or type(error).__name__
            msg = f"no engine answers at {self.url}/v1/models: {reason}; start it or mend --engine"
            raise EngineError(msg) from error
        found = [card for card in cards if model in (None, card.id)]
        if not found:
            names = ", ".join(card.id for card in cards) or "none"
            msg = f"the engine serves no model {model!r}; it serves {names}"
            raise UsageError(msg)
        return found[0]

    async def get(self, path: str) -> bytes:
        """A body, or nothing unless the status is 200."""
        try:
            async with self.client.get(self.url + path) as response:
                return await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError):
            return b""

    async def facts(self, path: str) -> dict[str, Any]:
        """A JSON object, or an empty one."""
        try:
            told = msgspec.json.decode(await self.get(path) or b"{}")
        except msgspec.DecodeError:
            return {}
        return told if isinstance(told, dict) else {}

    async def ask(self, wire: EngineFormat, ask: EngineRequest) -> Answer:
        """Sample. Raises what the engine says, or `EngineError` for nonsense."""
        post, reader, answer = wire.build_request(ask), wire.make_reader(ask), Answer()
        headers = {"content-type": "application/json", **post.headers}
        async with self.client.post(
            self.url + post.path, data=post.body, headers=headers
        ) as response:
            if response.status != 200:
                raise wire.parse_error(response.status, await response.read(), None)
            if not ask.stream:
                answer.deltas = reader.read_body(await response.read())
            else:
                async for line in response.content:
                    data = line[5:].strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        answer.reads += 1
                        answer.deltas += reader.read_events([data])
        if not any(delta.finish for delta in answer.deltas):
            msg = "the reply has no finish reason"
            raise EngineError(msg)
        return answer

    async def leave(self, wire: EngineFormat, ask: EngineRequest, *, after: int) -> int:
        """Begin a streamed answer and hang up after some events; how many there were."""
        post, reads = wire.build_request(ask), 0
        headers = {"content-type": "application/json", **post.headers}
        async with self.client.post(
            self.url + post.path, data=post.body, headers=headers
        ) as response:
            async for line in response.content:
                reads += line.startswith(b"data:")
                if reads >= after:
                    response.close()
                    break
        return reads

    async def running(self) -> int | None:
        """Requests that the engine is busy with; None if it does not tell."""
        found = re.findall(
            rb"^\w+:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([\d.e+]+)$",
            await self.get("/metrics"),
            re.MULTILINE,
        )
        if found:
            return int(sum(map(float, found)))
        loads = (await self.facts("/v1/loads")).get("loads")
        if isinstance(loads, list):
            return sum(int(load["num_running_reqs"] + load["num_waiting_reqs"]) for load in loads)
        return None
