"""Tokens: who may call which route."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from support.server import TASK, TOKENS, Answer, RunningServer, encode_result, serve
from tugline.errors import UsageError
from tugline.protocol import NodeRegistered
from tugline.server.http.app import ROUTES
from tugline.server.http.route import ApiRole, Person, Route, Tokens
from tugline.server.settings import TenantSettings

GUARDED = [route for route in ROUTES if route.roles]


def _path(route: Route, ident: str = "t") -> str:
    return route.path.replace("{id}", ident).replace("{number}", "1")


async def test_every_route_needs_its_token(server: RunningServer) -> None:
    """A missing, unknown or lost node's token gets 401, a role that the route lacks 403."""
    lost = await server.join("again")
    await server.lease(lost, wait_s=0)
    await server.join("again")
    node = await server.join()
    strangers = (None, "", "stranger", TOKENS.client + "x", TOKENS.client[:-1], lost.token)
    keys = {"client": TOKENS.client, "read": TOKENS.read, "join": TOKENS.join, "node": node.token}
    for route in GUARDED:
        for key in strangers:
            response = await server.ask(route.method, _path(route), key)
            assert response.refusal == (401, "unauthorized"), (route.path, key)
            assert response.headers["www-authenticate"].startswith("Bearer")
        for role in set(ApiRole) - route.roles:
            response = await server.ask(route.method, _path(route), keys[role])
            assert response.refusal == (403, "forbidden"), (route.path, role)


async def test_tokens_are_accepted_as_bearer_only(server: RunningServer) -> None:
    """URLs end up in logs, so that tokens in them are not accepted."""
    authorizations = ("Bearer", "Basic client-token", "client-token", "Bearer  ")
    elsewhere = ({"cookie": "token=client-token"}, {"x-api-key": "client-token"})
    for headers in (*({"authorization": one} for one in authorizations), *elsewhere):
        response = await server.ask("GET", "/v1/status", None, headers=headers)
        assert response.status == 401, headers
    assert (await server.ask("GET", "/v1/status?token=client-token", None)).status == 401


async def _send_all(
    server: RunningServer, node: NodeRegistered, epoch: int
) -> list[tuple[int, str]]:
    """Responses to a result, a log and a release of ``t-0`` by a node that does not hold it."""
    back = {"epoch": epoch, "reason": "because"}
    answers = [
        await server.commit(node, "t-0", epoch, b"not even unpacked"),
        await server.write_log(node, epoch, b"lies"),
        await server.ask("POST", "/v1/sessions/t-0/release", node.token, json=back),
    ]
    return [answer.refusal for answer in answers]


async def test_only_the_holding_node_writes_to_a_session(server: RunningServer) -> None:
    """Result, log and release are refused before the lease and after its end."""
    await server.submit()
    node, other = await server.join(), await server.join("other")
    refused = [(409, "fenced")] * 3
    for epoch in (0, 1):
        assert await _send_all(server, node, epoch) == refused
    (work,) = (await server.lease(node)).work
    epoch = work.session.epoch
    assert await _send_all(server, other, epoch) == refused
    assert (await server.commit(node, "t-0", epoch, encode_result("t-0", "t"))).status == 200
    assert await _send_all(server, other, epoch) == refused
    assert (await server.ask("GET", "/v1/sessions/t-0/result")).json["reward"] == 1.0
    assert (await server.ask("GET", "/v1/sessions/t-0/log")).body == b""


def read_audit_log(server: RunningServer) -> list[tuple[str, ...]]:
    """Who did what, in order."""
    path = server.control.folder / "audit.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    assert all(line["from"] == "127.0.0.1" and line["at"].endswith("Z") for line in lines)
    return [(line["who"], line["what"], *line.get("tasks", ())) for line in lines]


async def test_a_token_of_a_tenant_changes_only_its_work(server: RunningServer) -> None:
    """Changes to work of other tenants, and to what all tenants share, are refused."""
    people = {"eve": Person("eve-token", "client", "eve")}
    server.app.tokens = msgspec.structs.replace(TOKENS, people=people)
    given = {**TASK, "id": "a", "callback": {"url": "https://8.8.8.8/"}}
    assert (await server.ask("POST", "/v1/tasks", "client", json=given)).status == 201
    assert (await server.ask("POST", "/v1/tasks/a/cancel", "client")).status == 200
    [first, *_] = (await server.ask("GET", "/v1/deliveries", "client")).json
    for method, path, body in (
        ("PUT", "sessions/a-0/note", {"text": "mine"}),
        ("POST", "sessions/a-0/cancel", None),
        ("POST", "tasks/a/cancel", None),
        ("POST", f"deliveries/{first['id']}/retry", None),
        ("POST", "nodes/n/drain", None),
        ("POST", "weights", {"version": 1}),
        ("POST", "weights/pause", {}),
        ("POST", "weights/resume", None),
        ("DELETE", "consumers/c", None),
    ):
        response = await server.ask(method, f"/v1/{path}", "eve-token", json=body)
        assert response.status == 403, (path, response.body)


async def test_tenants_have_consumers_and_runs_of_their_own(server: RunningServer) -> None:
    """Names begin with the tenant's name; those of another tenant, or of all, are refused."""
    people = {name: Person(f"{name}-token", "client", name) for name in ("ann", "eve")}
    server.app.tokens = msgspec.structs.replace(TOKENS, people=people)
    for name, own, other in (("ann", "ann", "eve.x"), ("eve", "eve.x", "ann"), ("eve", "eve", "c")):
        for path, body in (
            ("results/ack?consumer={}", {"cursor": 0}),
            ("runs/{}/steps", {"step": 1, "figures": {"reward": 1.0}}),
        ):
            statuses = [
                (await server.ask("POST", f"/v1/{path.format(each)}", key, json=body)).status
                for each, key in (
                    (own, f"{name}-token"),
                    (other, f"{name}-token"),
                    (other, "client"),
                )
            ]
            assert statuses[1] == 403, (path, name)
            assert max(statuses[0], statuses[2]) < 300, (path, statuses)


async def test_the_audit_log_names_people(server: RunningServer) -> None:
    """Changes are logged with the name of the token; reads and the work of nodes are not.

    It is one scenario, since all requests write to the same log.
    """
    people = {"ann": Person("ann-token"), "bob": Person("bob-token", "read")}
    server.app.tokens = msgspec.structs.replace(TOKENS, people=people)

    async def ask(method: str, path: str, key: str, json: object = None) -> int:
        response = await server.ask(method, f"/v1/{path}", key, json=json)
        return int(response.status)

    assert await ask("POST", "tasks", "ann-token", {**TASK, "id": "a"}) == 201
    assert await ask("POST", "tasks", "bob-token", {**TASK, "id": "b"}) == 403
    assert await ask("GET", "tasks", "bob-token") == 200
    assert await ask("POST", "tasks/missing/cancel", "ann-token") == 404
    assert await ask("POST", "tasks/a/cancel?by=me", "client") == 200
    note = "sessions/a-0/note"
    assert await ask("PUT", note, "bob-token", {"text": " why? "}) == 403
    assert await ask("PUT", note, "ann-token", {"text": " why? "}) == 204
    for bad in ("x" * 2001, "a\0b"):
        assert await ask("PUT", note, "ann-token", {"text": bad}) == 422
    assert (await server.ask("GET", "/v1/sessions/a-0", "bob-token")).json["note"] == "why?"
    assert await ask("POST", "results/ack?consumer=c", "ann-token", {"cursor": 0}) == 200
    assert await ask("POST", "runs/r/steps", "ann-token", {"step": 1}) < 300
    await server.lease(await server.join(), wait_s=0.0)
    assert stat.S_IMODE((server.control.folder / "audit.jsonl").stat().st_mode) == 0o600
    assert read_audit_log(server) == [
        ("ann", "POST /v1/tasks", "a"),
        ("client", "POST /v1/tasks/a/cancel"),
        ("ann", "PUT /v1/sessions/a-0/note"),
        ("join", "POST /v1/nodes"),
    ]
    server.app.tokens = TOKENS
    assert await ask("GET", "tasks", "ann-token") == 401


async def test_a_failing_audit_log_is_logged(server: RunningServer) -> None:
    """The change itself succeeds, and the error is logged."""
    (server.control.folder / "audit.jsonl").mkdir()
    with structlog.testing.capture_logs() as logged:
        await server.submit()
    assert [(one["event"], one["tasks"]) for one in logged] == [("audit log not written", ["t"])]


def test_invalid_tokens_are_refused() -> None:
    """Tokens must be non-empty ASCII, and differ from each other."""
    for bad in (("", "b", "c"), ("a", "a", "c"), ("a b", "b", "c"), ("ä", "b", "c")):
        with pytest.raises(UsageError):
            Tokens(*bad)
    for people in ({"ann": Person("a")}, {"ann": Person("x"), "bob": Person("x")}):
        with pytest.raises(UsageError, match="must differ"):
            Tokens("a", "b", "c", people)
    with pytest.raises(UsageError, match=r"the people\.ann token must be non-empty ASCII"):
        Tokens("a", "b", "c", {"ann": Person("")})
    assert "client-token" not in repr(TOKENS)


# --------------------------------------------------------------------------- tenants
async def _post(server: RunningServer, key: str = "client", **changes: Any) -> Answer:
    return await server.ask("POST", "/v1/tasks", key, json={**TASK, **changes})


async def test_submissions_per_minute_are_limited(tmp_path: Path) -> None:
    """Each token and tenant has a limit; `retry-after` says when the next one is accepted."""
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
            assert response.refusal == (429, "quota")
            assert response.headers["retry-after"] == "20"
            detail = f"tenant is '{tenant}', whose limit is 2 submissions a minute for each token;"
            assert response.problem.detail == f"{detail} submit again in 20 s"
        assert (await _post(server, "ann-token", tenant="a")).status == 200
        assert (await _post(server, id="f", tenant="free")).status == 201
        for _ in range(3):
            assert (await server.ask("GET", "/v1/tasks")).status == 200
        now += 21
        assert [(await _post(server, tenant="a")).status for _ in range(2)] == [200, 429]


async def test_a_tenants_token_changes_only_its_own_work(server_of_each: RunningServer) -> None:
    """The token reads everything; tasks without a tenant get that of the token."""
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
        expected = "this token is limited to tenant 'lab'; the tenant is 'other'"
        assert response.problem.detail == expected
    assert (await server.ask("GET", "/v1/tasks/mine", "ann-token")).json["tenant"] == "lab"
    assert (await server.ask("GET", "/v1/tasks/theirs", "ann-token")).status == 200
    for path in ("tasks/mine", "sessions/mine-0"):
        assert (await server.ask("POST", f"/v1/{path}/cancel", "ann-token")).status == 200
    assert (await server.ask("POST", "/v1/tasks/missing/cancel", "ann-token")).status == 404
