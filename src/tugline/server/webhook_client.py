"""HTTP client for webhook deliveries.

In a module of its own because its library takes a fifth of a second to import, which would delay
the restart of a server.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult


class WebhookResponse(NamedTuple):
    """A receiver's answer, or why there is none."""

    status: int = 0
    retry_after: str = ""
    error: str = ""


class WebhookClient:
    """Posts without redirects or cookies; each try ends within `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0, resolver=_Resolver()),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "tugline", "Content-Type": "application/json"},
        )

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> WebhookResponse:
        """Send a delivery; no answer is read beyond its headers."""
        try:
            async with self._client.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return WebhookResponse(answer.status, answer.headers.get("Retry-After", ""))
        except TimeoutError:
            return WebhookResponse(error=f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, ValueError) as error:  # the latter for an invalid URL
            return WebhookResponse(error=str(error) or type(error).__name__)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


class _Resolver(AbstractResolver):
    """Resolves names in threads of its own, so a slow name server blocks nothing else."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="tugline-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of `host`. Raises `OSError`."""
        resolve = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, resolve)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=proto,
                flags=flags,
            )
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
