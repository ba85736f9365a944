"""Plain HTTP to one inference engine: which models it serves, and what it reports of itself."""

import asyncio
from typing import Any, Self

import aiohttp
import msgspec

from tugline.errors import EngineError, UsageError

ANSWER_TIMEOUT_S = 120.0
"""For one whole answer: the first of a fresh engine may take half a minute."""

_AWAY = frozenset({502, 503, 504})
"""Statuses of an engine that is loading, or of a proxy whose engine is down."""


class ModelCard(msgspec.Struct, frozen=True):
    """One model as ``/v1/models`` lists it."""

    id: str
    max_model_len: int = 0
    """Context window in tokens; 0 where the engine does not say."""
    owned_by: str = ""


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    owned_by: str = ""
    parent: str | None = None
    """Of an adapter: the model it is added to, whose window is its own."""


class _Models(msgspec.Struct):
    data: list[_ListedModel]


async def fetch_card(
    client: aiohttp.ClientSession, url: str, model: str | None, timeout_s: float = ANSWER_TIMEOUT_S
) -> ModelCard:
    """The model of this name, or the first. Raises `EngineError` or `UsageError`.

    A server that lists no models is believed to serve the one of this name.
    """
    status: int | None = None
    where = f"{url}/v1/models"
    try:
        async with asyncio.timeout(timeout_s), client.get(where) as response:
            if response.status == 401:
                msg = f"the engine at {url} refuses the API key, or wants one: engine.api_key_env"
                msg += " (--api-key-env) must name an environment variable with one that it accepts"
                raise UsageError(msg)
            status = None if response.status in _AWAY else response.status
            if model is not None and response.status == 404:
                return ModelCard(model)
            response.raise_for_status()
            cards = msgspec.json.decode(await response.read(), type=_Models).data
    except aiohttp.ClientResponseError as error:
        msg = f"no usable engine: {where} answers {error.status} {error.message}"
        raise EngineError(msg, status=status) from error
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        reason = str(error) or type(error).__name__
        msg = f"no usable engine at {where}: {reason}; start it or correct its address"
        raise EngineError(msg, status=status) from error
    for card in cards:
        if model in {None, card.id}:
            windows = [one.max_model_len for one in cards if one.id in {card.id, card.parent}]
            return ModelCard(card.id, max(n or 0 for n in windows), card.owned_by)
    if not cards and model is not None:
        return ModelCard(model)
    if not cards:
        raise UsageError(f"the engine lists no models at {where}: name the one it serves (--model)")
    names = ", ".join(card.id for card in cards)
    raise UsageError(f"the engine at {url} serves no model {model!r}; it serves {names}")


class EngineHttp:
    """An engine's address and a connection pool; no retries."""

    def __init__(
        self, url: str, key: str = "", *, timeout: aiohttp.ClientTimeout | None = None
    ) -> None:
        """`key` is its API key, if it wants one."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout or aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, connect=10)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._client = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, read_bufsize=1 << 20, headers=self._headers
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def client(self) -> aiohttp.ClientSession:
        """The pool. Raises `EngineError` outside the block."""
        if self._client is None:
            raise EngineError("the engine's connections are not open; enter it with `async with`")
        return self._client

    async def card(self, model: str | None) -> ModelCard:
        """See `fetch_card`."""
        return await fetch_card(self.client, self.url, model)

    async def post(
        self, path: str, body: bytes, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Send JSON; returns status and body. Raises `EngineError` if there is no answer."""
        timeout = aiohttp.ClientTimeout(timeout_s, connect=10)
        headers = {"content-type": "application/json"}
        try:
            async with self.client.post(
                self.url + path, data=body, headers=headers, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            msg = f"the engine at {self.url} did not answer {path}: {reason}"
            raise EngineError(msg) from error

    async def get(self, path: str) -> bytes:
        """A body; empty unless the status is 200."""
        try:
            async with self.client.get(self.url + path) as response:
                return await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError):
            return b""

    async def get_object(self, path: str) -> dict[str, Any]:
        """A JSON object; empty if there is none."""
        try:
            value = msgspec.json.decode(await self.get(path) or b"{}")
        except msgspec.DecodeError:
            return {}
        return value if isinstance(value, dict) else {}
