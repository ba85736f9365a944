"""The server as seen by a node over HTTP; implements `protocol.Dispatcher`.

The join token only permits `register`, which returns the node's own token. The token of a node that
was declared dead is revoked: its requests are answered 401, which is raised as a lost lease.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
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
"""Shorter than a lease; the node itself repeats failed calls with its newest state."""


class _LogLength(msgspec.Struct):
    length: int


class NodeClient:
    """Dispatcher client of one node; an async context manager.

    The node's own token is stored in `token_file`, so that the next process of this node can commit
    what the last one had finished.
    """

    def __init__(
        self,
        url: str,
        join_token: str,
        *,
        token_file: Path | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._http = Transport(url, join_token, deadline_s=deadline_s)
        self._token_file = token_file
        self._token: str | None = None

    async def __aenter__(self) -> Self:
        if self._token_file is not None and self._token_file.exists():
            self._token = self._token_file.read_text("ascii")
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    async def register(self, hello: NodeRegistration) -> NodeRegistered:
        """Join. Sessions leased to a previous node of this name are requeued."""
        welcome = await self._http.ask("POST", "/v1/nodes", NodeRegistered, body=hello)
        self._token = welcome.token
        if self._token_file is not None:
            await asyncio.to_thread(_write_token, self._token_file, welcome.token)
        return welcome

    async def lease(self, node: str, ask: LeaseRequest) -> LeaseResponse:
        """Wait up to `ask.wait_s` for leases or orders. Raises `FencedError` for a lost node."""
        with _fencing():
            return await self._http.ask(
                "POST",
                f"/v1/nodes/{node}/lease",
                LeaseResponse,
                body=ask,
                wait_s=ask.wait_s,
                token=self._token,
            )

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """Renew all leases. Raises `FencedError` for a lost node, which must register again."""
        path = f"/v1/nodes/{node}/renew"
        with _fencing():
            return await self._http.ask(
                "POST", path, LeaseResponse, body=renewal, token=self._token
            )

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Commit a result. Raises `FencedError` for a lost lease."""
        with _fencing():
            return await self._http.ask(
                "POST",
                f"/v1/sessions/{session}/result",
                Commit,
                query={"epoch": epoch},
                body=trajectory,
                token=self._token,
            )

    async def release(self, session: str, back: Release) -> None:
        """Return a session to the queue. Raises `FencedError` for a lost lease."""
        path = f"/v1/sessions/{session}/release"
        with _fencing():
            await self._http.ask("POST", path, type(None), body=back, token=self._token)

    async def drain(self, node: str) -> None:
        """Stop leasing sessions to this node."""
        with _fencing():
            await self._http.ask("POST", f"/v1/nodes/{node}/drain", type(None), token=self._token)

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append to the log of a session; returns its length, the next offset."""
        with _fencing():
            log = await self._http.ask(
                "POST",
                f"/v1/sessions/{session}/log",
                _LogLength,
                query={"epoch": epoch, "offset": offset},
                body=chunk,
                token=self._token,
            )
        return log.length


@contextlib.contextmanager
def _fencing() -> Iterator[None]:
    """Raise 401, the answer to a revoked token, as a lost lease."""
    try:
        yield
    except ServerError as error:
        if error.status != 401:
            raise
        raise FencedError(str(error)) from error


def _write_token(path: Path, token: str) -> None:
    draft = path.with_suffix(".part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    draft.replace(path)
