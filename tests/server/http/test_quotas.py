"""Limits of tenants and of tokens, as clients meet them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from served import TASK, TOKENS, Answer, Served, serve
from tugline.client.api import Client
from tugline.errors import QuotaExceeded
from tugline.server.http.route import Person
from tugline.server.settings import TenantSettings
from tugline.types import Task


async def _post(server: Served, key: str = "client", **changes: Any) -> Answer:
    return await server.ask("POST", "/v1/tasks", key, json={**TASK, **changes})


async def test_a_full_tenant_is_refused_by_name_and_number(store_url: str, tmp_path: Path) -> None:
    """The client library says so at once: time alone does not help."""
    async with (
        serve(store_url, tmp_path, tenants={"lab": TenantSettings(queued=3)}) as server,
        Client(server.url, TOKENS.client) as client,
    ):
        await server.submit(samples=2, tenant="lab")
        response = await _post(server, id="u", samples=2, tenant="lab")
        assert response.refusal == (429, "quota")
        assert response.problem.detail == (
            "tenant is 'lab', which may have 3 unfinished sessions and has 2;"
            " 2 more are too many: submit 1, and others as those end"
        )
        assert "retry-after" not in response.headers
        task = msgspec.convert({**TASK, "id": "u", "samples": 2, "tenant": "lab"}, Task)
        with pytest.raises(QuotaExceeded, match="submit 1, and others as those end") as caught:
            await client.submit([task])
        assert caught.value.field == "tenant"
        assert (await _post(server, id="u", samples=1, tenant="lab")).status == 201


async def test_a_token_submits_so_many_times_a_minute(tmp_path: Path) -> None:
    """For each tenant, or all without an entry; the answer says when the next one is taken."""
    limits = {"default": TenantSettings(requests_per_minute=2), "free": 1.0}
    async with serve(f"sqlite:{tmp_path / 'db'}", tmp_path, tenants=limits) as server:
        people = {"ann": Person("ann-token")}
        server.app.tokens = msgspec.structs.replace(TOKENS, people=people)
        server.control.database.clock = lambda: now
        now = 1e9
        assert [(await _post(server, tenant=tenant)).status for tenant in ("a", "a")] == [201, 200]
        now += 10.5
        for tenant in ("a", "b"):
            response = await _post(server, tenant=tenant)
            assert (response.status, response.headers["retry-after"]) == (429, "20")
            assert response.problem.detail == (
                f"tenant is '{tenant}', for which a token may submit 2 times a minute;"
                " submit again in 20 s"
            )
        assert (await _post(server, "ann-token", tenant="a")).status == 200
        assert (await _post(server, id="f", tenant="free")).status == 201
        for _ in range(3):
            assert (await server.ask("GET", "/v1/tasks")).status == 200
        now += 21
        assert [(await _post(server, tenant="a")).status for _ in range(2)] == [200, 429]


async def test_a_person_of_a_tenant_works_for_that_one_only(server_of_each: Served) -> None:
    """Submits and cancels its work, and reads everything; what names no tenant gets it."""
    server = server_of_each
    people = {"ann": Person("ann-token", tenant="lab")}
    server.app.tokens = msgspec.structs.replace(TOKENS, people=people)
    await server.submit(id="theirs", tenant="other")
    assert (await _post(server, "ann-token", id="mine")).status == 201
    assert (await _post(server, "ann-token", id="mine", tenant="lab")).status == 200
    for response in (
        await _post(server, "ann-token", id="no", tenant="other"),
        await server.ask("POST", "/v1/tasks/theirs/cancel", "ann-token"),
        await server.ask("POST", "/v1/sessions/theirs-0/cancel", "ann-token"),
    ):
        assert response.refusal == (403, "forbidden")
        said = "this token is for the work of tenant 'lab' only, not of 'other'"
        assert response.problem.detail == said
    assert (await server.ask("GET", "/v1/tasks/mine", "ann-token")).json["tenant"] == "lab"
    assert (await server.ask("GET", "/v1/tasks/theirs", "ann-token")).status == 200
    for path in ("tasks/mine", "sessions/mine-0"):
        assert (await server.ask("POST", f"/v1/{path}/cancel", "ann-token")).status == 200
    assert (await server.ask("POST", "/v1/tasks/missing/cancel", "ann-token")).status == 404
