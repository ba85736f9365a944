"""Refused requests: status, type, field, and what would be right."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from support.server import TASK, TOKENS, RunningServer
from tugline.client.api import Client
from tugline.errors import Invalid
from tugline.protocol import FieldError, NodeRegistered
from tugline.server.http.app import THREAD_BYTES
from tugline.server.validation import check_task
from tugline.types import Callback, Limits, PluginSpec, Task, Workspace

JSON = {"content-type": "application/json"}
POST = "POST /v1/tasks"
Mistake = tuple[str, dict[str, Any], tuple[int, str, str], str]
"""Request, how it is sent, status, problem and field, part of the detail."""


def _read_rows(node: NodeRegistered) -> Iterator[Mistake]:
    """Rows of bad_input.jsonl: changes to a valid task, or any request, and who sends it."""
    keys = {"join": "join", "node": node.token}
    for line in Path(__file__).with_name("bad_input.jsonl").read_text().splitlines():
        row = json.loads(line)
        body = [TASK | changes for changes in row["tasks"]] if "tasks" in row else row.get("json")
        how = {"key": keys.get(row.get("as"), "client"), "json": body}
        refusal = row.get("refusal", (422, "invalid"))
        request = row.get("ask", POST).replace("NODE", node.node)
        yield request, how, (*refusal, row.get("field", "")), row["says"]


MORE: list[Mistake] = [
    (POST, {"data": b"null", "headers": JSON}, (422, "invalid", ""), "a list"),
    (POST, {"data": b'[{"id": ', "headers": JSON}, (400, "malformed", ""), "byte 8"),
    (POST, {"data": b"[nan]", "headers": JSON}, (400, "malformed", ""), "byte 5"),
    (POST, {"data": b"[" * 9999, "headers": JSON}, (400, "malformed", ""), "deep"),
    (POST, {"data": b'"\xff"', "headers": JSON}, (400, "malformed", ""), "JSON"),
    (POST, {"data": b" " * (THREAD_BYTES + 1), "headers": JSON}, (400, "malformed", ""), "byte"),
    (POST, {"data": b"id=t"}, (415, "media-type", ""), "application/json"),
    (POST, {"headers": JSON | {"content-encoding": "br"}}, (415, "media-type", ""), "br"),
    (POST, {"json": TASK | {"id": "x" * 129}}, (422, "invalid", "0.id"), "128"),
    (POST, {"json": [TASK] * 1001}, (422, "invalid", ""), "1001"),
    ("GET /v1/events", {"headers": {"accept": "a/b"}}, (406, "not-acceptable", ""), "event-stream"),
]


@pytest.mark.timeout(60)
async def test_bad_requests_are_refused(server_of_each: RunningServer) -> None:
    """Each refusal has its status, type, field and a helpful detail, and nothing is stored."""
    server, wrong = server_of_each, []
    for request, how, expected, part in (*_read_rows(await server.join()), *MORE):
        method, path = request.split(" ")
        response = await server.ask(method, path, **how)
        problem = response.problem
        got = (*response.refusal, problem.field)
        if got != expected or part not in problem.detail or problem.status != response.status:
            wrong.append((request, str(how)[:80], got, problem.detail))
    assert not wrong, "\n".join(map(str, wrong))
    assert (await server.ask("GET", "/v1/status")).json["tasks_open"] == 0


def _fields(mistakes: Sequence[FieldError | Invalid]) -> list[str]:
    return [each.field for each in mistakes]


async def test_all_mistakes_of_a_body_are_reported_at_once(server: RunningServer) -> None:
    """Mistakes of types come before those of validation; the client raises one error."""
    wrong = [dict(TASK, samples=0, limits={"agent_s": "x"}), dict(TASK, id="u", priority="x")]
    problem = (await server.ask("POST", "/v1/tasks", json=wrong)).problem
    assert _fields(problem.errors) == ["0.samples", "0.limits.agent_s", "1.priority"]
    assert problem.field == "0.samples"
    assert problem.detail == "; ".join(each.detail for each in problem.errors)
    odd = [dict(TASK, instruction=" ", tags={"a=": ""}), dict(TASK, id="u", files={"../x": ""})]
    problem = (await server.ask("POST", "/v1/tasks", json=odd)).problem
    assert _fields(problem.errors) == ["0.instruction", "0.tags", "1.files"]
    async with Client(server.url, TOKENS.client) as client:
        with pytest.raises(Invalid) as refused:
            await client.submit(replace(SOUND, instruction=" ", tags={"a=": ""}))
    assert _fields(refused.value.problems) == ["0.instruction", "0.tags"]


async def test_bodies_are_bounded(server: RunningServer) -> None:
    """A body is refused by its declared length, or while it is received."""
    too_much = io.BytesIO(b" " * ((1 << 20) + 1))
    response = await server.ask("POST", "/v1/weights", headers=JSON, data=too_much)
    assert response.refusal == (413, "too-large")

    async def endless() -> Any:
        for _ in range(64):
            yield b" " * (1 << 16)

    response = await server.ask("POST", "/v1/weights", headers=JSON, data=endless())
    assert response.status == 413


SOUND = Task(id="t", instruction="i", harness=PluginSpec("a"), evaluator=PluginSpec("b"))


@pytest.mark.parametrize("value", [0, -1, 8e6, math.nan, math.inf])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    """A task that was made in Python is checked as well."""
    with pytest.raises(Invalid, match="agent_s") as refused:
        check_task(replace(SOUND, limits=Limits(agent_s=value)))
    assert refused.value.field == "limits.agent_s"


GOOD: list[dict[str, Any]] = [
    {"callback": Callback("http://a.b/c?d=e")},
    {"callback": Callback("https://[::1]:8080/x")},
    {"callback": Callback("http://localhost")},
    {"workspace": Workspace(image="python:3.11-slim", repo="repo", commit="v1", path="/testbed")},
    {"workspace": Workspace(image="an-image-with-a-repository", commit="HEAD")},
]


def test_unusual_tasks_are_accepted() -> None:
    """Callbacks may go to any web address, and a workspace may be of several kinds."""
    for change in GOOD:
        check_task(replace(SOUND, **change))
