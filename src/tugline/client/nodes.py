"""The server as a node sees it over HTTP: the same `protocol.Dispatcher` as in one process.

The join token opens nothing but `register`, whose answer brings the node's own token. A node that
was given up has none any more: whatever it says then is answered 401, which is told as the lost
lease that it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tugline.client.transport import Transport
from tugline.errors import FencedError, ServerError
from tugline.protocol import (
    Commit,
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    Release,
    Renewal,
)

DEADLINE_S = 10.0
"""Shorter than a lease. A node asks again by itself then, and says what it has by that time."""


class _Length(msgspec.Struct):
    length: int


class NodeClient:
    """A `Dispatcher` at a URL, for one node; an async context manager.

    The node's own token is kept in the file `kept`, so that the next process of this node can
    still commit what the last one had finished.
    """

    def __init__(
        self,
        url: str,
        join_token: str,
        *,
        kept: Path | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._http = Transport(url, join_token, deadline_s=deadline_s)
        self._kept = kept
        self._token: str | None = None

    async def __aenter__(self) -> Self:
        if self._kept is not None and self._kept.exists():
            self._token = self._kept.read_text("ascii")
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def register(self, hello: NodeRegistration) -> NodeRegistered:
        """Join. What a node of the same name still held is given to others."""
        welcome = await self._http.ask("POST", "/v1/nodes", NodeRegistered, body=hello)
        self._token = welcome.token
        if self._kept is not None:
            await asyncio.to_thread(_write, self._kept, welcome.token)
        return welcome

    async def lease(self, node: str, ask: LeaseRequest) -> LeaseResponse:
        """Wait for work, for orders or for `ask.wait_s`. Raises `FencedError` for a lost node."""
        with _lost():
            return await self._http.ask(
                "POST",
                f"/v1/nodes/{node}/lease",
                LeaseResponse,
                body=ask,
                wait_s=ask.wait_s,
                token=self._token,
            )

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Keep the lease. Raises `FencedError` for a lost node, which must register again."""
        path = f"/v1/nodes/{node}/renew"
        with _lost():
            return await self._http.ask(
                "POST", path, LeaseResponse, body=renewal, token=self._token
            )

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Keep a result. Raises `FencedError` for a lost lease."""
        with _lost():
            return await self._http.ask(
                "POST",
                f"/v1/sessions/{session}/result",
                Commit,
                query={"epoch": epoch},
                body=trajectory,
                token=self._token,
            )

    async def release(self, session: str, back: Release) -> None:
        """Give a session back to the queue. Raises `FencedError` for a lost lease."""
        path = f"/v1/sessions/{session}/release"
        with _lost():
            await self._http.ask("POST", path, type(None), body=back, token=self._token)

    async def drain(self, node: str) -> None:
        """Give this node nothing more."""
        with _lost():
            await self._http.ask("POST", f"/v1/nodes/{node}/drain", type(None), token=self._token)

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Add to the log of a session; returns its length, from which to go on."""
        with _lost():
            told = await self._http.ask(
                "POST",
                f"/v1/sessions/{session}/log",
                _Length,
                query={"epoch": epoch, "offset": offset},
                body=chunk,
                token=self._token,
            )
        return told.length


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        if error.status != 401:
            raise
        raise FencedError(str(error)) from error


def _write(path: Path, token: str) -> None:
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    draft.replace(path)
