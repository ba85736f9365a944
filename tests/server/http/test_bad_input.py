"""What must not come in, and how it is told: status, type, field, and what would be right."""

from __future__ import annotations

import io
import math
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec import Meta

from served import TASK, TOKENS, Served
from tugline.client.api import Client
from tugline.errors import Invalid
from tugline.server.http.app import THREAD_BYTES
from tugline.server.validation import check_task
from tugline.types import Callback, Group, Limits, PluginSpec, Sampling, Task, Workspace

JSON = {"content-type": "application/json"}
POST = "POST /v1/tasks"


def _task(**changes: Any) -> dict[str, Any]:
    return {**TASK, **changes}


TABLE: list[tuple[str, dict[str, Any], int, str, str, str]] = [
    # request, how, status, problem, field, part of the detail
    (POST, {"json": _task(limits={"agent_s": -1})}, 422, "invalid", "0.limits.agent_s", "-1"),
    (
        POST,
        {"json": _task(limits={"agent_s": "9"})},
        422,
        "invalid",
        "0.limits.agent_s",
        "a number",
    ),
    (
        POST,
        {"json": _task(limits={"agents_s": 1})},
        422,
        "invalid",
        "0.limits.agents_s",
        "'agent_s'",
    ),
    (POST, {"json": _task(sample=4)}, 422, "invalid", "0.sample", "'samples'"),
    (
        POST,
        {"json": [_task(), _task(id="u", samples=0)]},
        422,
        "invalid",
        "1.samples",
        "is 0, must",
    ),
    (POST, {"json": [_task(), _task(id="u", bad=1)]}, 422, "invalid", "1.bad", "unknown"),
    (POST, {"json": _task(id="a b")}, 422, "invalid", "0.id", "'a b'"),
    (POST, {"json": _task(id="")}, 422, "invalid", "0.id", "128"),
    (POST, {"json": _task(id="x" * 129)}, 422, "invalid", "0.id", "128"),
    (POST, {"json": _task(tenant="a/b")}, 422, "invalid", "0.tenant", "'a/b'"),
    (POST, {"json": _task(priority=11)}, 422, "invalid", "0.priority", "<= 10"),
    (
        POST,
        {"json": _task(harness={"name": "shell", "options": {"max_output_tokens": 10**30}})},
        422,
        "invalid",
        "0.harness.options",
        "2**64",
    ),
    (POST, {"json": _task(priority=10**30)}, 422, "invalid", "0.priority", "is 1000"),
    (POST, {"json": _task(sampling_policy="x")}, 422, "invalid", "0.sampling_policy", "enforce"),
    (POST, {"json": _task(instruction="")}, 422, "invalid", "0.instruction", "is '', must be"),
    (POST, {"json": _task(instruction=" \n")}, 422, "invalid", "0.instruction", "what to do"),
    (POST, {"json": _task(tags={"a": 1})}, 422, "invalid", "0.tags.a", "a string"),
    (POST, {"json": _task(files={"../x": ""})}, 422, "invalid", "0.files", "'../x'"),
    (POST, {"json": _task(files={"/etc/x": ""})}, 422, "invalid", "0.files", "relative"),
    (POST, {"json": _task(files={"a": "", "a/b": ""})}, 422, "invalid", "0.files", "file"),
    (POST, {"json": _task(callback={"url": "ftp://x"})}, 422, "invalid", "0.callback.url", "http"),
    (
        POST,
        {"json": _task(callback={"url": "http://[x"})},
        422,
        "invalid",
        "0.callback.url",
        "http",
    ),
    (
        POST,
        {"json": _task(group={"min_usable": 2})},
        422,
        "invalid",
        "0.group.min_usable",
        "samples",
    ),
    (POST, {"json": {"id": "t"}}, 422, "invalid", "0.instruction", "missing"),
    (POST, {"json": []}, 422, "invalid", "", "1 to 1000"),
    (POST, {"json": [_task()] * 1001}, 422, "invalid", "", "1001"),
    (POST, {"json": "text"}, 422, "invalid", "", "a list"),
    (POST, {"data": b"null", "headers": JSON}, 422, "invalid", "", "a list"),
    (POST, {"data": b'[{"id": ', "headers": JSON}, 400, "malformed", "", "byte 8"),
    (POST, {"data": b"[nan]", "headers": JSON}, 400, "malformed", "", "byte 5"),
    (POST, {"data": b"[" * 9999, "headers": JSON}, 400, "malformed", "", "deep"),
    (POST, {"data": b'"\xff"', "headers": JSON}, 400, "malformed", "", "JSON"),
    (POST, {"data": b" " * (THREAD_BYTES + 1), "headers": JSON}, 400, "malformed", "", "byte"),
    (POST, {"data": {"id": "t"}}, 415, "media-type", "", "application/json"),
    (
        POST,
        {"data": b"x", "headers": JSON | {"content-encoding": "br"}},
        415,
        "media-type",
        "",
        "br",
    ),
    ("PUT /v1/tasks", {}, 405, "method", "", "POST"),
    ("DELETE /v1/tasks/t", {}, 405, "method", "", "GET"),
    ("GET /v2/tasks", {}, 404, "no-route", "", "/v2/tasks"),
    ("GET /v1%2fstatus", {}, 404, "no-route", "", "/v1%2Fstatus"),
    ("GET /v1/tasks/{id}", {}, 404, "no-route", "", "nothing"),
    ("GET /v1/tasks/", {}, 404, "no-route", "", "nothing"),
    ("GET /v1/tasks/nope", {}, 404, "missing", "", "nope"),
    ("GET /v1/tasks/a%00b", {}, 404, "no-route", "", "a"),
    ("GET /v1/sessions/nope-0/log", {}, 404, "missing", "", "nope-0"),
    ("GET /v1/sessions/nope-0/trajectory", {}, 404, "missing", "", "nope-0"),
    ("POST /v1/tasks/nope/cancel", {}, 404, "missing", "", "nope"),
    ("POST /v1/tasks/t/cancel?by=", {}, 422, "invalid", "by", "length"),
    ("POST /v1/tasks/t/cancel", {"json": {"by": "me"}}, 422, "invalid", "by", "unknown"),
    ("POST /v1/deliveries/77/retry", {}, 404, "missing", "", "77"),
    ("POST /v1/deliveries/x/retry", {}, 404, "no-route", "", "x"),
    ("GET /v1/tasks?stat=open", {}, 422, "invalid", "stat", "'state'"),
    ("GET /v1/tasks?state=opn", {}, 422, "invalid", "state", "released"),
    ("GET /v1/tasks?limit=0", {}, 422, "invalid", "limit", ">= 1"),
    ("GET /v1/tasks?limit=1&limit=2", {}, 422, "invalid", "limit", "twice"),
    ("GET /v1/tasks?tag=x", {}, 422, "invalid", "tag", "'x'"),
    ("GET /v1/tasks?tenant=%00", {}, 422, "invalid", "tenant", "zero byte"),
    ("GET /v1/tasks?after=what", {}, 422, "invalid", "after", "what"),
    ("GET /v1/sessions?after=what", {}, 422, "invalid", "after", "what"),
    ("GET /v1/results?wait_s=61", {}, 422, "invalid", "wait_s", "60"),
    ("GET /v1/results?wait_s=nan", {}, 422, "invalid", "wait_s", "nan"),
    ("GET /v1/results?after=-1", {}, 422, "invalid", "after", ">= 0"),
    ("GET /v1/results?after=" + "9" * 30, {}, 422, "invalid", "after", "<="),
    (
        "GET /v1/events",
        {"headers": {"accept": "text/csv"}},
        406,
        "not-acceptable",
        "",
        "event-stream",
    ),
    ("GET /v1/events?limit=x", {}, 422, "invalid", "limit", "'x'"),
    ("POST /v1/results/ack", {"json": {"cursor": 0}}, 422, "invalid", "consumer", "missing"),
    (
        "POST /v1/results/ack?consumer=a%20b",
        {"json": {"cursor": 0}},
        422,
        "invalid",
        "consumer",
        "a b",
    ),
    ("POST /v1/results/ack?consumer=a", {"json": {"cursor": 9**15}}, 422, "invalid", "cursor", "9"),
    ("POST /v1/results/ack?consumer=a", {}, 422, "invalid", "cursor", "missing"),
    ("POST /v1/weights", {"json": {"version": -1}}, 422, "invalid", "version", "-1"),
    ("POST /v1/weights/pause", {"json": {"within_s": -1}}, 422, "invalid", "within_s", ">= 0"),
    ("POST /v1/weights/pause", {"json": {"mode": "x"}}, 422, "invalid", "mode", "abort"),
]


@pytest.mark.timeout(60)
async def test_the_table_of_bad_input(server_of_each: Served) -> None:
    """Each mistake gets its status, type, field and a detail that helps; nothing is kept."""
    server, wrong = server_of_each, []
    for request, how, status, name, field, part in TABLE:
        method, path = request.split(" ")
        response = await server.ask(method, path, **how)
        problem = response.problem
        got = (response.status, problem.type.removeprefix("urn:tugline:problem:"), problem.field)
        if got != (status, name, field) or part not in problem.detail or problem.status != status:
            wrong.append((request, str(how)[:80], got, problem.detail))
    assert not wrong, "\n".join(map(str, wrong))
    assert (await server.ask("GET", "/v1/status")).json["tasks_open"] == 0


async def test_all_mistakes_of_a_body_are_answered_at_once(server: Served) -> None:
    """Of the types, and then of what is sensible; the client raises one error with all of them."""
    wrong = [_task(samples=0, limits={"agent_s": "x"}), _task(id="u", priority="x")]
    problem = (await server.ask("POST", "/v1/tasks", json=wrong)).problem
    assert [each.field for each in problem.errors] == [
        "0.samples",
        "0.limits.agent_s",
        "1.priority",
    ]
    assert problem.field == "0.samples"
    assert problem.detail == "; ".join(each.detail for each in problem.errors)
    odd = [_task(instruction=" ", tags={"a=": ""}), _task(id="u", files={"../x": ""})]
    problem = (await server.ask("POST", "/v1/tasks", json=odd)).problem
    assert [each.field for each in problem.errors] == ["0.instruction", "0.tags", "1.files"]
    task = Task(id="t", instruction=" ", harness=PluginSpec("a"), evaluator=PluginSpec("b"))
    async with Client(server.url, TOKENS.client) as client:
        with pytest.raises(Invalid) as refused:
            await client.submit([msgspec.structs.replace(task, tags={"a=": ""})])
    assert [each.field for each in refused.value.problems] == ["0.instruction", "0.tags"]


async def test_bodies_are_bounded(server: Served) -> None:
    """What is too large is refused by its length, and where none is told, as soon as it shows."""
    too_much = io.BytesIO(b" " * ((1 << 20) + 1))
    response = await server.ask("POST", "/v1/weights", headers=JSON, data=too_much)
    assert (response.status, response.problem.type[20:]) == (413, "too-large")

    async def endless() -> Any:
        for _ in range(64):
            yield b" " * (1 << 16)

    response = await server.ask("POST", "/v1/weights", headers=JSON, data=endless())
    assert response.status == 413


async def test_what_nodes_say_is_held_to_the_same(server: Served) -> None:
    """A node's mistake is named as well as a client's."""
    for body, field in (
        ({"name": "a b", "slots": 1, "capacity": 1}, "name"),
        ({"name": "a", "slots": 0, "capacity": 1}, "slots"),
        ({"name": "a", "slots": 1, "capacity": 1, "gatway": ""}, "gatway"),
        ({"name": "a", "slots": 1, "capacity": 1, "labels": {"": ""}}, "labels"),
    ):
        response = await server.ask("POST", "/v1/nodes", "join", json=body)
        assert (response.status, response.problem.field) == (422, field)
    node = await server.join()
    for body, field in (
        ({"capacity": -1}, "capacity"),
        ({"capacity": 1, "wait_s": 1e9}, "wait_s"),
        ({"capacity": 1, "held": [["a\0b", 1, "run"]]}, "held.0.session"),
        ({"capacity": 1, "held": [{"session": "a", "epoch": -1, "status": "run"}]}, "held.0.epoch"),
    ):
        path = f"/v1/nodes/{node.node}/lease"
        response = await server.ask("POST", path, node.token, json=body)
        assert response.status == 422, response
        assert response.problem.field in {field, "held.0"}
    await server.submit()
    (work,) = (await server.lease(node)).work
    for data in (b"", b"not a trajectory", b"\x28\xb5\x2f\xfd garbage"):
        response = await server.commit(node, work.session.id, work.session.epoch, data)
        assert response.status == 422, response
    response = await server.commit(node, work.session.id, 2**31, b"")
    assert response.problem.field == "epoch"


def _with(field: str, value: Any) -> Task:
    parent, _, name = field.rpartition(".")
    kinds = {"limits": Limits, "sampling": Sampling, "group": Group}
    inner = {parent: kinds[parent](**{name: value})} if parent else {name: value}
    task = Task(
        id="t", instruction="i", harness=PluginSpec("a"), evaluator=PluginSpec("b"), samples=10_000
    )
    return msgspec.structs.replace(task, **inner)


def _bounds() -> list[tuple[str, Meta]]:
    """Every bounded number of a task, with its dotted name."""
    found = []
    for parent, kind in {"": Task, "limits": Limits, "sampling": Sampling, "group": Group}.items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            for each in (hint, *get_args(hint)):
                metas = [meta for meta in getattr(each, "__metadata__", ()) if meta.le is not None]
                found += [(f"{parent}.{name}".lstrip("."), meta) for meta in metas]
    return found


@pytest.mark.parametrize(("field", "meta"), _bounds(), ids=str)
def test_every_number_has_a_range(field: str, meta: Meta) -> None:
    """The bounds are accepted; what is beyond them and what is no number is refused."""
    low = meta.ge if meta.ge is not None else meta.gt
    check_task(_with(field, meta.le))
    check_task(_with(field, low if meta.ge is not None else low + 1e-9))
    for value in (low - (meta.ge is not None), meta.le + 1, math.nan, math.inf):
        with pytest.raises(Invalid, match=field) as refused:
            check_task(_with(field, value))
        assert refused.value.field == field


def test_the_numbers_of_a_task_are_bounded() -> None:
    """No number is left without a range."""
    assert len(_bounds()) == 19


@pytest.mark.parametrize("url", ["http://a.b/c?d=e", "https://[::1]:8080/x", "http://localhost"])
def test_a_callback_may_be_any_web_address(url: str) -> None:
    """Names, ports, IPv6, queries."""
    task = Task(id="t", instruction="i", harness=PluginSpec("a"), evaluator=PluginSpec("b"))
    check_task(msgspec.structs.replace(task, callback=Callback(url)))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "http://",
        "http://u:p@h/",
        "http://h:99999/",
        "http://h/a b",
        "http://h/\n",
        "http:/h",
    ],
)
def test_a_callback_must_be_a_web_address(url: str) -> None:
    """Nothing that a client could not be sent to, and no password in the rows."""
    task = Task(id="t", instruction="i", harness=PluginSpec("a"), evaluator=PluginSpec("b"))
    with pytest.raises(Invalid, match=r"callback\.url"):
        check_task(msgspec.structs.replace(task, callback=Callback(url)))


@pytest.mark.parametrize(
    ("workspace", "field"),
    [
        (Workspace(image="a", build="b"), "workspace.build"),
        (Workspace(repo="a", folder="b"), "workspace.folder"),
        (Workspace(commit="main"), "workspace.commit"),
        (Workspace(folder="/a", commit="main"), "workspace.commit"),
        (Workspace(folder="a"), "workspace.folder"),
        (Workspace(path="testbed"), "workspace.path"),
        (Workspace(path="/a/../etc"), "workspace.path"),
        (Workspace(image=""), "workspace.image"),
        (Workspace(repo="a", folder=""), "workspace.folder"),
    ],
)
def test_a_workspace_that_cannot_be_is_refused(workspace: Workspace, field: str) -> None:
    """Two places to begin with, a commit of nothing, a path that leads nowhere: named at once."""
    task = msgspec.structs.replace(_with("samples", 1), workspace=workspace)
    with pytest.raises(Invalid) as refused:
        check_task(task)
    assert refused.value.field == field
    good = Workspace(image="python:3.11-slim", repo="repo", commit="v1", path="/testbed")
    for each in (good, Workspace(image="an-image-with-a-repository", commit="HEAD")):
        check_task(msgspec.structs.replace(task, workspace=each))
