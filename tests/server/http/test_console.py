"""What the console needs of the server: its files, open to everybody, and lists."""

from __future__ import annotations

import re

import pytest

from served import Served
from tugline.server.store import sessions


@pytest.mark.parametrize("path", ["/", "/sessions", "/sessions/mend-0?turn=3", "/nodes/n.1"])
async def test_each_page_is_the_console(server: Served, path: str) -> None:
    """Whoever opens a link gets the same page, which may run its own scripts only."""
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


@pytest.mark.parametrize("path", ["/assets/none.js", "/assets/", "/assets/..%2Findex.html"])
async def test_nothing_else_is_served(server: Served, path: str) -> None:
    """What is no file of the console is a problem like any other."""
    assert (await server.ask("GET", path, None)).problem.type.endswith("no-route")


async def test_the_newest_come_first_with_their_results(
    server_of_each: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages backwards, results of those that have ended with their node, parts of ids."""
    server = server_of_each
    await server.finish(id="mend", samples=3)
    await server.submit(id="later", samples=2)
    first = (await server.ask("GET", "/v1/sessions?newest=true&limit=3", "read")).json
    assert [one["id"] for one in first["sessions"]] == ["later-1", "later-0", "mend-2"]
    [result] = first["results"]
    assert (result["session"], result["reward"], result["node"][:2]) == ("mend-2", 1.0, "n.")
    path = f"/v1/sessions?newest=true&limit=3&after={first['next']}"
    second = (await server.ask("GET", path, "read")).json
    assert [one["id"] for one in second["sessions"]] == ["mend-1", "mend-0"]
    assert second["next"] is None
    part = (await server.ask("GET", "/v1/sessions?q=end-1", "read")).json
    assert [one["id"] for one in part["sessions"]] == ["mend-1"]
    for q, found in {
        "mend": ["mend-0", "mend-1", "mend-2"],
        "mend-": ["mend-0", "mend-1", "mend-2"],
        "-1": ["mend-1", "later-1"],
        "1": ["mend-1", "later-1"],
        "e": ["mend-0", "mend-1", "mend-2", "later-0", "later-1"],
        "mend-3": [],
        "1111111": [],
        "-1111111": [],
        "d-1111111": [],
        "nothing": [],
    }.items():
        part = (await server.ask("GET", f"/v1/sessions?q={q}", "read")).json
        assert [one["id"] for one in part["sessions"]] == found, q
    monkeypatch.setattr(sessions, "_FEW_TASKS", 1)  # then sessions are searched, not tasks
    part = (await server.ask("GET", "/v1/sessions?q=e", "read")).json
    assert len(part["sessions"]) == 5
    tasks = (await server.ask("GET", "/v1/tasks?newest=true&limit=1", "read")).json
    assert [one["id"] for one in tasks["tasks"]] == ["later"]
    path = f"/v1/tasks?newest=true&after={tasks['next']}"
    assert [one["id"] for one in (await server.ask("GET", path)).json["tasks"]] == ["mend"]
