"""One try to send a callback over HTTP.

It is a file of its own because its library takes a fifth of a second to import, which a server that
was killed has no time for.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult


class Answer(NamedTuple):
    """What a receiver said, or why it could not."""

    status: int = 0
    retry_after: str = ""
    error: str = ""


class Poster:
    """A client that follows nothing and keeps nothing; each try is over in `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0, resolver=_Resolver()),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "tugline", "Content-Type": "application/json"},
        )

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Send; no answer is read beyond its headers."""
        try:
            async with self._client.post(
                url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return Answer(answer.status, answer.headers.get("Retry-After", ""))
        except TimeoutError:
            return Answer(error=f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, ValueError) as error:  # the latter for what is no URL
            return Answer(error=str(error) or type(error).__name__)

    async def close(self) -> None:
        """End its connections."""
        await self._client.close()


class _Resolver(AbstractResolver):
    """Looks names up in threads of its own, so a slow name server blocks nothing else."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="tugline-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Its addresses. Raises `OSError`."""
        find = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, find)
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
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)
