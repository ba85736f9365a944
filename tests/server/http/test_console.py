"""The web console's files, open to everybody, and its lists."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.server import RunningServer


@pytest.mark.parametrize("path", ["/", "/sessions", "/sessions/mend-0?turn=3", "/nodes/n.1"])
async def test_every_path_serves_the_console(server: RunningServer, path: str) -> None:
    """Links lead to the same page, which may run only its own scripts.

    The headers are those of one response.
    """
    page = await server.ask("GET", path, None)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    assert b"<script>" not in page.body
    names = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.body.decode())
    assert len(names) >= 3
    for name in names:
        asset = await server.ask("GET", name, None)
        assert (asset.status, len(asset.body) > 0) == (200, True)
        assert "immutable" in asset.headers["cache-control"]


async def test_lists_begin_with_the_newest(server_of_each: RunningServer) -> None:
    """Pages go backwards, with the results of ended sessions."""
    server = server_of_each
    await server.finish(id="mend", samples=3)
    await server.submit(id="later", samples=2)

    async def read(kind: str, query: str) -> tuple[list[str], Any]:
        page = (await server.ask("GET", f"/v1/{kind}?newest=true&{query}", "read")).json
        return [one["id"] for one in page[kind]], page

    ids, first = await read("sessions", "limit=3")
    assert ids == ["later-1", "later-0", "mend-2"]
    [result] = first["results"]
    assert (result["session"], result["reward"], result["node"][:2]) == ("mend-2", 1.0, "n.")
    ids, second = await read("sessions", f"limit=3&after={first['next']}")
    assert (ids, second["next"]) == (["mend-1", "mend-0"], None)
    ids, tasks = await read("tasks", "limit=1")
    assert ids == ["later"]
    assert (await read("tasks", f"after={tasks['next']}"))[0] == ["mend"]
