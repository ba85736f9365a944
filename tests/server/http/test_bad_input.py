"""What must not come in, and how it is told: status, type, field, and what would be right."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Meta
from msgspec.structs import replace

from served import TASK, TOKENS, Served
from tugline.client.api import Client
from tugline.errors import Invalid
from tugline.protocol import FieldError
from tugline.server.http.app import THREAD_BYTES
from tugline.server.validation import check_task
from tugline.types import Callback, Group, Limits, PluginSpec, Sampling, Task, Workspace

JSON = {"content-type": "application/json"}
POST = "POST /v1/tasks"
HUGE = {"max_output_tokens": 10**30}


def _task(**changes: Any) -> dict[str, Any]:
    return {**TASK, **changes}


TASKS: list[tuple[dict[str, Any], str, str]] = [
    # what is changed in a task, field, part of the detail
    ({"limits": {"agent_s": -1}}, "limits.agent_s", "-1"),
    ({"limits": {"agent_s": "9"}}, "limits.agent_s", "a number"),
    ({"limits": {"agents_s": 1}}, "limits.agents_s", "'agent_s'"),
    ({"sample": 4}, "sample", "'samples'"),
    ({"id": "a b"}, "id", "'a b'"),
    ({"id": ""}, "id", "128"),
    ({"id": "x" * 129}, "id", "128"),
    ({"tenant": "a/b"}, "tenant", "'a/b'"),
    ({"priority": 11}, "priority", "<= 10"),
    ({"harness": {"name": "shell", "options": HUGE}}, "harness.options", "2**64"),
    ({"priority": 10**30}, "priority", "is 1000"),
    ({"sampling_policy": "x"}, "sampling_policy", "enforce"),
    ({"instruction": ""}, "instruction", "is '', must be"),
    ({"instruction": " \n"}, "instruction", "what to do"),
    ({"tags": {"a": 1}}, "tags.a", "a string"),
    ({"files": {"../x": ""}}, "files", "'../x'"),
    ({"files": {"/etc/x": ""}}, "files", "relative"),
    ({"files": {"a": "", "a/b": ""}}, "files", "file"),
    ({"callback": {"url": "ftp://x"}}, "callback.url", "http"),
    ({"callback": {"url": "http://[x"}}, "callback.url", "http"),
    ({"group": {"min_usable": 2}}, "group.min_usable", "samples"),
]
BODIES: list[tuple[str, object, str, str]] = [
    # request, JSON, field, part of the detail
    (POST, [_task(), _task(id="u", samples=0)], "1.samples", "is 0, must"),
    (POST, [_task(), _task(id="u", bad=1)], "1.bad", "unknown"),
    (POST, {"id": "t"}, "0.instruction", "missing"),
    (POST, [], "", "1 to 1000"),
    (POST, [_task()] * 1001, "", "1001"),
    (POST, "text", "", "a list"),
    ("POST /v1/tasks/t/cancel", {"by": "me"}, "by", "unknown"),
    ("POST /v1/results/ack", {"cursor": 0}, "consumer", "missing"),
    ("POST /v1/results/ack?consumer=a%20b", {"cursor": 0}, "consumer", "a b"),
    ("POST /v1/results/ack?consumer=a", {"cursor": 9**15}, "cursor", "9"),
    ("POST /v1/weights", {"version": -1}, "version", "-1"),
    ("POST /v1/weights/pause", {"within_s": -1}, "within_s", ">= 0"),
    ("POST /v1/weights/pause", {"mode": "x"}, "mode", "abort"),
]
QUERIES: list[tuple[str, str, str]] = [
    # request, field, part of the detail
    ("POST /v1/tasks/t/cancel?by=", "by", "length"),
    ("GET /v1/tasks?stat=open", "stat", "'state'"),
    ("GET /v1/tasks?state=opn", "state", "released"),
    ("GET /v1/tasks?limit=0", "limit", ">= 1"),
    ("GET /v1/tasks?limit=1&limit=2", "limit", "twice"),
    ("GET /v1/tasks?tag=x", "tag", "'x'"),
    ("GET /v1/tasks?tenant=%00", "tenant", "zero byte"),
    ("GET /v1/tasks?after=what", "after", "what"),
    ("GET /v1/sessions?after=what", "after", "what"),
    ("GET /v1/results?wait_s=61", "wait_s", "60"),
    ("GET /v1/results?wait_s=nan", "wait_s", "nan"),
    ("GET /v1/results?after=-1", "after", ">= 0"),
    ("GET /v1/results?after=" + "9" * 30, "after", "<="),
    ("GET /v1/events?limit=x", "limit", "'x'"),
    ("POST /v1/results/ack?consumer=a", "cursor", "missing"),
]
DATA: list[tuple[bytes, dict[str, str], int, str, str]] = [
    # body of a submission, headers, status, problem, part of the detail
    (b"null", JSON, 422, "invalid", "a list"),
    (b'[{"id": ', JSON, 400, "malformed", "byte 8"),
    (b"[nan]", JSON, 400, "malformed", "byte 5"),
    (b"[" * 9999, JSON, 400, "malformed", "deep"),
    (b'"\xff"', JSON, 400, "malformed", "JSON"),
    (b" " * (THREAD_BYTES + 1), JSON, 400, "malformed", "byte"),
    (b"id=t", {}, 415, "media-type", "application/json"),
    (b"x", JSON | {"content-encoding": "br"}, 415, "media-type", "br"),
]
PLACES: list[tuple[str, int, str, str]] = [
    # request, status, problem, part of the detail
    ("PUT /v1/tasks", 405, "method", "POST"),
    ("DELETE /v1/tasks/t", 405, "method", "GET"),
    ("GET /v2/tasks", 404, "no-route", "/v2/tasks"),
    ("GET /v1%2fstatus", 404, "no-route", "/v1%2Fstatus"),
    ("GET /v1/tasks/{id}", 404, "no-route", "nothing"),
    ("GET /v1/tasks/", 404, "no-route", "nothing"),
    ("GET /v1/tasks/nope", 404, "missing", "nope"),
    ("GET /v1/tasks/a%00b", 404, "no-route", "a"),
    ("GET /v1/sessions/nope-0/log", 404, "missing", "nope-0"),
    ("GET /v1/sessions/nope-0/trajectory", 404, "missing", "nope-0"),
    ("POST /v1/tasks/nope/cancel", 404, "missing", "nope"),
    ("POST /v1/deliveries/77/retry", 404, "missing", "77"),
    ("POST /v1/deliveries/x/retry", 404, "no-route", "x"),
]
TABLE: list[tuple[str, dict[str, Any], int, str, str, str]] = [
    # request, how, status, problem, field, part of the detail
    *(
        (POST, {"json": _task(**changes)}, 422, "invalid", f"0.{field}", part)
        for changes, field, part in TASKS
    ),
    *((request, {"json": body}, 422, "invalid", *told) for request, body, *told in BODIES),
    *((request, {}, 422, "invalid", *told) for request, *told in QUERIES),
    *(
        (POST, {"data": body, "headers": headers}, status, problem, "", part)
        for body, headers, status, problem, part in DATA
    ),
    *((request, {}, status, problem, "", part) for request, status, problem, part in PLACES),
    ("GET /v1/events", {"headers": {"accept": "a/b"}}, 406, "not-acceptable", "", "event-stream"),
]


@pytest.mark.timeout(60)
async def test_the_table_of_bad_input(server_of_each: Served) -> None:
    """Each mistake gets its status, type, field and a detail that helps; nothing is kept."""
    server, wrong = server_of_each, []
    for request, how, status, name, field, part in TABLE:
        method, path = request.split(" ")
        response = await server.ask(method, path, **how)
        problem = response.problem
        got = (*response.refusal, problem.field)
        if got != (status, name, field) or part not in problem.detail or problem.status != status:
            wrong.append((request, str(how)[:80], got, problem.detail))
    assert not wrong, "\n".join(map(str, wrong))
    assert (await server.ask("GET", "/v1/status")).json["tasks_open"] == 0


def _fields(mistakes: Sequence[FieldError | Invalid]) -> list[str]:
    return [each.field for each in mistakes]


async def test_all_mistakes_of_a_body_are_answered_at_once(server: Served) -> None:
    """Of the types, and then of what is sensible; the client raises one error with all of them."""
    wrong = [_task(samples=0, limits={"agent_s": "x"}), _task(id="u", priority="x")]
    problem = (await server.ask("POST", "/v1/tasks", json=wrong)).problem
    assert _fields(problem.errors) == ["0.samples", "0.limits.agent_s", "1.priority"]
    assert problem.field == "0.samples"
    assert problem.detail == "; ".join(each.detail for each in problem.errors)
    odd = [_task(instruction=" ", tags={"a=": ""}), _task(id="u", files={"../x": ""})]
    problem = (await server.ask("POST", "/v1/tasks", json=odd)).problem
    assert _fields(problem.errors) == ["0.instruction", "0.tags", "1.files"]
    async with Client(server.url, TOKENS.client) as client:
        with pytest.raises(Invalid) as refused:
            await client.submit(replace(SOUND, instruction=" ", tags={"a=": ""}))
    assert _fields(refused.value.problems) == ["0.instruction", "0.tags"]


async def test_bodies_are_bounded(server: Served) -> None:
    """What is too large is refused by its length, and where none is told, as soon as it shows."""
    too_much = io.BytesIO(b" " * ((1 << 20) + 1))
    response = await server.ask("POST", "/v1/weights", headers=JSON, data=too_much)
    assert response.refusal == (413, "too-large")

    async def endless() -> Any:
        for _ in range(64):
            yield b" " * (1 << 16)

    response = await server.ask("POST", "/v1/weights", headers=JSON, data=endless())
    assert response.status == 413


HELLO = {"name": "a", "slots": 1, "capacity": 1}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("", {**HELLO, "name": "a b"}, "name"),
        ("", {**HELLO, "name": ""}, "name"),
        ("", {**HELLO, "slots": 0}, "slots"),
        ("", {**HELLO, "capacity": -1}, "capacity"),
        ("", {**HELLO, "gatway": ""}, "gatway"),
        ("", {**HELLO, "labels": {"": ""}}, "labels"),
        ("/{}/lease", {"capacity": -1}, "capacity"),
        ("/{}/lease", {"capacity": 1, "wait_s": 1e9}, "wait_s"),
        ("/{}/lease", {"capacity": 1, "held": [["a\0b", 1, "run"]]}, "held.0"),
        ("/{}/renew", {"held": [{"session": "a", "epoch": -1, "status": "run"}]}, "held.0.epoch"),
    ],
)
async def test_what_nodes_say_is_held_to_the_same(
    server: Served, path: str, body: dict[str, Any], field: str
) -> None:
    """A node's mistake is named as well as a client's."""
    node = await server.join()
    key = node.token if path else "join"
    response = await server.ask("POST", "/v1/nodes" + path.format(node.node), key, json=body)
    assert (response.status, response.problem.field) == (422, field)


async def test_a_result_must_be_one(server: Served) -> None:
    """Of an epoch that there can be, and a trajectory."""
    node, epoch = await server.start()
    for data in (b"", b"not a trajectory", b"\x28\xb5\x2f\xfd garbage"):
        assert (await server.commit(node, "t-0", epoch, data)).status == 422
    assert (await server.commit(node, "t-0", 2**31, b"")).problem.field == "epoch"


SOUND = Task(id="t", instruction="i", harness=PluginSpec("a"), evaluator=PluginSpec("b"))
KINDS: dict[str, Any] = {"limits": Limits, "sampling": Sampling, "group": Group}


def _with(field: str, value: Any) -> Task:
    parent, _, name = field.rpartition(".")
    inner = {parent: KINDS[parent](**{name: value})} if parent else {name: value}
    return replace(SOUND, **{"samples": 10_000, **inner})


def _bounds() -> list[tuple[str, Meta]]:
    """Every bounded number of a task, with its dotted name."""
    found = []
    for parent, kind in {"": Task, **KINDS}.items():
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


GOOD: list[dict[str, Any]] = [
    {"callback": Callback("http://a.b/c?d=e")},
    {"callback": Callback("https://[::1]:8080/x")},
    {"callback": Callback("http://localhost")},
    {"workspace": Workspace(image="python:3.11-slim", repo="repo", commit="v1", path="/testbed")},
    {"workspace": Workspace(image="an-image-with-a-repository", commit="HEAD")},
]


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_what_can_be_is_taken(change: dict[str, Any]) -> None:
    """Callbacks at any web address; one place to begin with."""
    check_task(replace(SOUND, **change))


URLS = ("", "x", "http://", "http://u:p@h/", "http://h:99999/", "http://h/a b", "http://h/\n",
        "http:/h")  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_a_callback_must_be_a_web_address(url: str) -> None:
    """Nothing that a client could not be sent to, and no password in the rows."""
    with pytest.raises(Invalid, match=r"callback\.url"):
        check_task(replace(SOUND, callback=Callback(url)))


@pytest.mark.parametrize(
    ("workspace", "field"),
    [
        (Workspace(image="a", build="b"), "build"),
        (Workspace(repo="a", folder="b"), "folder"),
        (Workspace(commit="main"), "commit"),
        (Workspace(folder="/a", commit="main"), "commit"),
        (Workspace(folder="a"), "folder"),
        (Workspace(path="testbed"), "path"),
        (Workspace(path="/a/../etc"), "path"),
        (Workspace(image=""), "image"),
        (Workspace(repo="a", folder=""), "folder"),
    ],
)
def test_a_workspace_that_cannot_be_is_refused(workspace: Workspace, field: str) -> None:
    """Two places to begin with, a commit of nothing, a path that leads nowhere: named at once."""
    with pytest.raises(Invalid) as refused:
        check_task(replace(SOUND, workspace=workspace))
    assert refused.value.field == f"workspace.{field}"
