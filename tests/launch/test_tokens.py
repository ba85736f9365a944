"""Replacing the tokens of a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.polling import until
from support.server import TOKENS, RunningServer, serve
from tugline.launch import tokens
from tugline.server.store import nodes


async def _until_status(
    server: RunningServer, status: int, method: str, path: str, token: str
) -> None:
    """Repeat a request with this token until its status is `status`."""
    body = {} if method == "GET" else {"json": {}}

    async def is_answered() -> bool:
        return (await server.ask(method, path, token, **body)).status == status

    await until(is_answered)


async def test_a_replaced_token_file_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing or damaged file changes nothing; a new join token also revokes the nodes."""
    monkeypatch.setattr(tokens, "TOKENS_EVERY_S", 0.01)
    path = tmp_path / "tokens.json"
    async with serve(f"sqlite:{tmp_path / 'tugline.db'}", tmp_path) as server:
        await server.control.database.write(nodes.bind_tokens, TOKENS.join)
        node = await server.join()
        follow = tokens.follow_tokens(server.app, server.control.database, path)
        task = asyncio.create_task(follow)
        try:
            for damaged in (None, "{", '{"client": "a", "join": "a", "read": "b"}'):
                if damaged is not None:
                    path.write_text(damaged)
                await asyncio.sleep(0.1)
                assert (await server.ask("GET", "/v1/status", TOKENS.client)).status == 200

            new = {"client": "new-client", "join": TOKENS.join, "read": "new-read"}
            path.write_text(json.dumps(new))
            await _until_status(server, 200, "GET", "/v1/status", "new-client")
            assert (await server.ask("GET", "/v1/status", TOKENS.client)).status == 401
            renew = f"/v1/nodes/{node.node}/renew"
            assert (await server.ask("POST", renew, node.token, json={})).status == 200

            path.write_text(json.dumps(new | {"join": "new-join"}))
            await _until_status(server, 401, "POST", renew, node.token)
            await _until_status(server, 401, "POST", "/v1/nodes", TOKENS.join)
            await _until_status(server, 422, "POST", "/v1/nodes", "new-join")
            assert not task.done()
        finally:
            task.cancel()
