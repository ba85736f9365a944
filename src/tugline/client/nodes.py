"""HTTP client of a node; implements `protocol.Dispatcher`.

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
"""Deadline of a call, shorter than a lease; the node repeats failed calls with its newest state."""


T = TypeVar("T")


class NodeClient(Transport):
    """Dispatcher client of one node; an async context manager.

    The node's own token is stored in `token_file`, so that the next process of this node can commit
    the results of the previous one.
    """

    def __init__(self, url: str, join_token: str, *, token_file: Path | None = None) -> None:
        super().__init__(url, join_token, deadline_s=DEADLINE_S)
        self._token_file = token_file
        self._own_token: str | None = None

    async def __aenter__(self) -> Self:
        if self._token_file is not None and self._token_file.exists():
            self._own_token = self._token_file.read_text("ascii")
        return await super().__aenter__()

    async def register(self, registration: protocol.NodeRegistration) -> protocol.NodeRegistered:
        """Join. Sessions leased to a previous node of this name are requeued."""
        node = await self.ask("POST", "/v1/nodes", protocol.NodeRegistered, body=registration)
        self._own_token = node.token
        if self._token_file is not None:
            await asyncio.to_thread(write_file, self._token_file, node.token.encode(), 0o600)
        return node

    async def lease(self, node: str, request: protocol.LeaseRequest) -> protocol.LeaseResponse:
        """Wait up to `request.wait_s` for work or orders. Raises `FencedError` for a lost node."""
        path = f"/v1/nodes/{node}/lease"
        return await self._post(path, protocol.LeaseResponse, request, wait_s=request.wait_s)

    async def renew(self, node: str, renewal: protocol.Renewal) -> protocol.LeaseResponse:
        """Renew all leases. Raises `FencedError` for a lost node, which must register again."""
        return await self._post(f"/v1/nodes/{node}/renew", protocol.LeaseResponse, renewal)

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> protocol.Commit:
        """Commit a result. Raises `FencedError` for a lost lease."""
        path = f"/v1/sessions/{session}/result"
        return await self._post(path, protocol.Commit, trajectory, query={"epoch": epoch})

    async def release(self, session: str, release: protocol.Release) -> None:
        """Return a session to the queue. Raises `FencedError` for a lost lease."""
        await self._post(f"/v1/sessions/{session}/release", type(None), release)

    async def drain(self, node: str) -> None:
        """Stop leasing sessions to this node."""
        await self._post(f"/v1/nodes/{node}/drain", type(None))

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """Append to the log of a session; returns the log's length, which is the next offset."""
        path = f"/v1/sessions/{session}/log"
        query = {"epoch": epoch, "offset": offset}
        return (await self._post(path, protocol.LogLength, chunk, query=query)).length

    async def _post(
        self, path: str, kind: type[T], body: msgspec.Struct | bytes | None = None, **options: Any
    ) -> T:
        """Send a request with the node's own token; `options` are those of `ask`.

        A revoked token (401) is raised as `FencedError`.
        """
        try:
            return await self.ask("POST", path, kind, body=body, token=self._own_token, **options)
        except ServerError as error:
            if error.status != 401:
                raise
            raise FencedError(str(error)) from error
