"""Every door, and every key that must not open it."""

from __future__ import annotations

import json
import secrets
import stat

import msgspec
import pytest
import structlog

from served import TOKENS, Served, result
from tugline.errors import UsageError
from tugline.server.http.handlers import ROUTES
from tugline.server.http.route import ApiRole, Person, Route, Tokens

GUARDED = [route for route in ROUTES if route.roles]
NAMES = [f"{route.method} {route.path}" for route in GUARDED]


def _path(route: Route, ident: str = "t") -> str:
    return route.path.replace("{id}", ident).replace("{number}", "1")


async def test_no_route_opens_without_its_token(server: Served) -> None:
    """Nobody, a stranger, and every role that a route does not name are refused, on every route."""
    node = await server.join()
    keys = {"client": TOKENS.client, "read": TOKENS.read, "join": TOKENS.join, "node": node.token}
    for route in GUARDED:
        for key in (None, "", "stranger", TOKENS.client + "x", TOKENS.client[:-1]):
            response = await server.ask(route.method, _path(route), key)
            assert (response.status, response.problem.type[20:]) == (401, "unauthorized"), (
                route.path,
                key,
            )
            assert response.headers["www-authenticate"].startswith("Bearer")
        for role in set(ApiRole) - route.roles:
            response = await server.ask(route.method, _path(route), keys[role])
            assert (response.status, response.problem.type[20:]) == (403, "forbidden"), (
                route.path,
                role,
            )


async def test_the_roles_are_these() -> None:
    """Who may do what is a decision: it does not change by accident."""
    may = {
        role: {n for n, r in zip(NAMES, GUARDED, strict=True) if role in r.roles}
        for role in ApiRole
    }
    assert may[ApiRole.JOIN] == {"POST /v1/nodes"}
    assert may[ApiRole.READ] == {name for name in NAMES if name.startswith("GET ")}
    assert may[ApiRole.NODE] == {
        "POST /v1/nodes/{id}/lease",
        "POST /v1/nodes/{id}/renew",
        "POST /v1/nodes/{id}/drain",
        "POST /v1/sessions/{id}/result",
        "POST /v1/sessions/{id}/log",
        "POST /v1/sessions/{id}/release",
    }
    only_nodes = may[ApiRole.NODE] - {"POST /v1/nodes/{id}/drain"}
    assert may[ApiRole.CLIENT] == set(NAMES) - only_nodes - {"POST /v1/nodes"}
    assert [route.path for route in ROUTES if not route.roles] == ["/healthz"]


@pytest.mark.parametrize("header", ["Bearer", "Basic client-token", "client-token", "Bearer  "])
async def test_only_bearer_tokens_are_tokens(server: Served, header: str) -> None:
    """A token elsewhere in the header is none."""
    response = await server.ask("GET", "/v1/status", None, headers={"authorization": header})
    assert response.status == 401


async def test_a_token_in_the_query_or_a_cookie_is_none(server: Served) -> None:
    """Tokens stay out of addresses, which end up in logs."""
    response = await server.ask("GET", f"/v1/status?token={TOKENS.client}", None)
    assert response.status == 401
    cookie = {"cookie": f"token={TOKENS.client}"}
    assert (await server.ask("GET", "/v1/status", None, headers=cookie)).status == 401


async def test_a_node_speaks_for_itself_alone(server: Served) -> None:
    """It can neither lease, renew nor drain as another node."""
    one, two = await server.join("one"), await server.join("two")
    for verb in ("lease", "renew", "drain"):
        body = {"capacity": 1, "wait_s": 0} if verb == "lease" else {}
        response = await server.ask("POST", f"/v1/nodes/{two.node}/{verb}", one.token, json=body)
        assert response.status == 403, verb
    assert {one["state"] for one in (await server.ask("GET", "/v1/nodes")).json} == {"live"}


async def test_a_node_cannot_touch_the_session_of_another(server: Served) -> None:
    """Result, log and return of a session are taken from the node that holds it, no other."""
    await server.submit()
    one, two = await server.join("one"), await server.join("two")
    (work,) = (await server.lease(one)).work
    sid, epoch = work.session.id, work.session.epoch
    response = await server.commit(two, sid, epoch, result(sid, "t", reward=99.0))
    assert (response.status, response.problem.type[20:]) == (409, "fenced")
    log = f"/v1/sessions/{sid}/log?epoch={epoch}&offset=0"
    assert (await server.ask("POST", log, two.token, data=b"lies")).status == 409
    back = {"epoch": epoch, "reason": "because"}
    path = f"/v1/sessions/{sid}/release"
    assert (await server.ask("POST", path, two.token, json=back)).status == 409
    assert (await server.commit(one, sid, epoch, result(sid, "t"))).status == 200
    assert (await server.ask("GET", f"/v1/sessions/{sid}/result")).json["reward"] == 1.0


async def test_a_node_cannot_write_to_a_session_that_nobody_holds(server: Served) -> None:
    """Not before it is leased, and not after its end; what it sends is not even unpacked."""
    await server.submit()
    early = await server.join("early")
    log, noise = "/v1/sessions/t-0/log?offset=0&epoch=", b"no trajectory"
    for node, epoch in ((early, 0), (early, 1)):
        sent = [await server.ask("POST", f"{log}{epoch}", node.token, data=b"lies")]
        sent.append(await server.commit(node, "t-0", epoch, noise))
        assert [(response.status, response.problem.type[20:]) for response in sent] == [
            (409, "fenced")
        ] * 2
    (work,) = (await server.lease(early)).work
    data = result("t-0", "t")
    assert (await server.commit(early, "t-0", work.session.epoch, data)).status == 200
    late = await server.join("late")
    for response in (
        await server.ask("POST", f"{log}{work.session.epoch}", late.token, data=b"lies"),
        await server.commit(late, "t-0", work.session.epoch, noise),
    ):
        assert (response.status, response.problem.type[20:]) == (409, "fenced")
    assert (await server.commit(early, "t-0", work.session.epoch, data)).json[
        "outcome"
    ] == "already"
    assert (await server.ask("GET", "/v1/sessions/t-0/log")).body == b""


async def test_an_agent_that_posts_its_own_reward_is_refused(server: Served) -> None:
    """The secret of a session opens model calls at the gateway, and nothing of the server."""
    await server.submit()
    (work,) = (await server.lease(await server.join())).work
    secret = secrets.token_urlsafe(32)
    data = result(work.session.id, "t", reward=99.0)
    for key in (None, secret, work.session.id):
        path = f"/v1/sessions/{work.session.id}/result?epoch={work.session.epoch}"
        assert (await server.ask("POST", path, key, data=data)).status == 401
    headers = {"x-api-key": secret}
    assert (await server.ask("GET", "/v1/status", None, headers=headers)).status == 401


def audited(server: Served) -> list[tuple[str, ...]]:
    """Who did what, in order."""
    path = server.control.folder / "audit.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    assert all(line["from"] == "127.0.0.1" and line["at"].endswith("Z") for line in lines)
    return [(line["who"], line["what"], *line.get("tasks", ())) for line in lines]


async def test_people_have_tokens_of_their_own_and_the_audit_log_has_their_names(
    server: Served,
) -> None:
    """What changes something is written down with who did it; reading and nodes' work are not."""
    people = {"ann": Person("ann-token"), "bob": Person("bob-token", "read")}
    server.app.tokens = msgspec.structs.replace(TOKENS, people=people)
    task = {"instruction": "do", "harness": {"name": "shell"}, "evaluator": {"name": "tests"}}
    assert (
        await server.ask("POST", "/v1/tasks", "ann-token", json={"id": "a", **task})
    ).status == 201
    assert (
        await server.ask("POST", "/v1/tasks", "bob-token", json={"id": "b", **task})
    ).status == 403
    assert (await server.ask("GET", "/v1/tasks", "bob-token")).status == 200
    assert (await server.ask("POST", "/v1/tasks/missing/cancel", "ann-token")).status == 404
    assert (await server.ask("POST", "/v1/tasks/a/cancel?by=me", "client")).status == 200
    note, text = "/v1/sessions/a-0/note", {"text": " why? "}
    assert (await server.ask("PUT", note, "bob-token", json=text)).status == 403
    assert (await server.ask("PUT", note, "ann-token", json=text)).status == 204
    assert (await server.ask("GET", note[:-5], "bob-token")).json["note"] == "why?"
    for bad in ("x" * 2001, "a\0b"):
        assert (await server.ask("PUT", note, "ann-token", json={"text": bad})).status == 422
    for path, body in (
        ("/v1/results/ack?consumer=c", {"cursor": 0}),
        ("/v1/runs/r/steps", {"step": 1}),
    ):
        assert (await server.ask("POST", path, "ann-token", json=body)).status < 300
    node = await server.join()
    await server.lease(node, wait_s=0.0)
    assert stat.S_IMODE((server.control.folder / "audit.jsonl").stat().st_mode) == 0o600
    assert audited(server) == [
        ("ann", "POST /v1/tasks", "a"),
        ("client", "POST /v1/tasks/a/cancel"),
        ("ann", "PUT /v1/sessions/a-0/note"),
        ("join", "POST /v1/nodes"),
    ]
    server.app.tokens = TOKENS
    assert (await server.ask("GET", "/v1/tasks", "ann-token")).status == 401


async def test_an_audit_log_that_cannot_be_written_is_said(server: Served) -> None:
    """The change is made: its client is not told of a fault, but the server's log is."""
    (server.control.folder / "audit.jsonl").mkdir()
    with structlog.testing.capture_logs() as said:
        await server.submit()
    assert [(one["event"], one["tasks"]) for one in said] == [("audit log not written", ["t"])]


def test_tokens_must_be_tokens() -> None:
    """An empty token would open the server to everybody, two equal ones would blur the roles."""
    for bad in (("", "b", "c"), ("a", "a", "c"), ("a b", "b", "c"), ("ä", "b", "c")):
        with pytest.raises(UsageError):
            Tokens(*bad)
    for people in ({"ann": Person("a")}, {"ann": Person("x"), "bob": Person("x")}):
        with pytest.raises(UsageError, match="must differ"):
            Tokens("a", "b", "c", people)
    with pytest.raises(UsageError, match=r"the people\.ann token must be ASCII"):
        Tokens("a", "b", "c", {"ann": Person("")})
    assert "client-token" not in repr(TOKENS)
