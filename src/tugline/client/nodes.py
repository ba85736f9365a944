"""The server as seen by a node over HTTP; implements `protocol.Dispatcher`.

The join token only permits `register`, which returns the node's own token. The token of a node that
was declared dead is revoked: its requests are answered 401, which is raised as a lost lease.
"""

import asyncio
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from tugline import protocol
from tugline.atomic import write_file
from tugline.client.transport import Transport
from tugline.errors import FencedError, ServerError

DEADLINE_S = 10.0
"""Shorter than a lease; the node itself repeats failed calls with its newest state."""


T = TypeVar("T")


class NodeClient(Transport):
    """Dispatcher client of one node; an async context manager.

    The node's own token is stored in `token_file`, so that the next process of this node can commit
    what the last one had finished.
    """

    def __init__(self, url: str, join_token: str, *, token_file: Path | None = None) -> None:
        super().__init__(url, join_token, deadline_s=DEADLINE_S)
        self._token_file = token_file
        self._own_token: str | None = None

    async def __aenter__(self) -> Self:
        if self._token_file is not None and self._token_file.exists():
            self._own_token = self._token_file.read_text("ascii")
        return await super().__aenter__()

    async def register(self, hello: protocol.NodeRegistration) -> protocol.NodeRegistered:
        """Join. Sessions leased to a previous node of this name are requeued."""
        welcome = await self.ask("POST", "/v1/nodes", protocol.NodeRegistered, body=hello)
        self._own_token = welcome.token
        if self._token_file is not None:
            await asyncio.to_thread(write_file, self._token_file, welcome.token.encode(), 0o600)
        return welcome

    async def lease(self, node: str, ask: protocol.LeaseRequest) -> protocol.LeaseResponse:
        """Wait up to `ask.wait_s` for leases or orders. Raises `FencedError` for a lost node."""
        path = f"/v1/nodes/{node}/lease"
        return await self._post(path, protocol.LeaseResponse, ask, wait_s=ask.wait_s)

    async def renew(self, node: str, renewal: protocol.Renewal) -> protocol.LeaseResponse:
        """Renew all leases. Raises `FencedError` for a lost node, which must register again."""
        return await self._post(f"/v1/nodes/{node}/renew", protocol.LeaseResponse, renewal)

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> protocol.Commit:
        """Commit a result. Raises `FencedError` for a lost lease."""
        path = f"/v1/sessions/{session}/result"
        return await self._post(path, protocol.Commit, trajectory, query={"epoch": epoch})

    async def release(self, session: str, back: protocol.Release) -> None:
        """Return a session to the queue. Raises `FencedError` for a lost lease."""
        await self._post(f"/v1/sessions/{session}/release", type(None), back)

    async def drain(self, node: str) -> None:
        """Stop leasing sessions to this node."""
        await self._post(f"/v1/nodes/{node}/drain", type(None))

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append to the log of a session; returns its length, the next offset."""
        path, query = f"/v1/sessions/{session}/log", {"epoch": epoch, "offset": offset}
        return (await self._post(path, protocol.LogLength, chunk, query=query)).length

    async def _post(
        self, path: str, kind: type[T], body: msgspec.Struct | bytes | None = None, **options: Any
    ) -> T:
        """Send a request with the node's own token; `options` are those of `ask`.

        401, it is revoked, is a lost lease.
        """
        try:
            return await self.ask("POST", path, kind, body=body, token=self._own_token, **options)
        except ServerError as error:
            if error.status != 401:
                raise
            raise FencedError(str(error)) from error
