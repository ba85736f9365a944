"""The routes with a real control plane behind them: what each is good for."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import msgspec
import pytest
import zstandard

from recording.view.synthetic import small
from served import TASK, TOKENS, Served, result, spoil
from tugline.errors import StoreError
from tugline.protocol import Problem
from tugline.server.http.handlers import ROUTES
from tugline.server.http.route import PROBLEMS
from tugline.server.store import nodes, stats
from tugline.server.store.base import Tx
from tugline.types import Task

DOCS = Path(__file__).resolve().parents[3] / "docs" / "api.md"


# --------------------------------------------------------------------------- tasks and sessions
async def test_a_task_is_submitted_once(server: Served) -> None:
    """201 the first time, 200 for the same again, 409 for another of its id."""
    first = await server.ask("POST", "/v1/tasks", json=TASK)
    assert (first.status, first.json) == (201, [{"task": "t", "sessions": ["t-0"], "new": True}])
    again = await server.ask("POST", "/v1/tasks", json=[TASK])
    assert (again.status, again.json[0]["new"]) == (200, False)
    other = await server.ask("POST", "/v1/tasks", json={**TASK, "instruction": "other"})
    assert (other.status, other.problem.type[20:]) == (409, "conflict")


async def test_a_batch_is_kept_whole_or_not_at_all(server: Served) -> None:
    """One conflict in a thousand keeps the other 999 out."""
    await server.submit()
    batch = [{**TASK, "id": f"b{n}"} for n in range(999)]
    response = await server.ask("POST", "/v1/tasks", json=[*batch, {**TASK, "instruction": "x"}])
    assert response.status == 409
    assert response.problem.field == "999.id"
    assert (await server.ask("GET", "/v1/tasks/b0")).status == 404
    assert len((await server.ask("POST", "/v1/tasks", json=batch)).json) == 999


async def test_a_task_can_be_looked_at_and_had_back(server: Served) -> None:
    """Its state, its body as it came, its sessions, and lists of them by pages."""
    await server.submit(samples=3, tags={"set": "a"}, tenant="lab")
    await server.submit(id="u")
    task = (await server.ask("GET", "/v1/tasks/t", "read")).json
    assert (task["state"], task["counts"], task["tenant"]) == ("open", {"queued": 3}, "lab")
    body = msgspec.json.decode((await server.ask("GET", "/v1/tasks/t/body")).body, type=Task)
    assert body == msgspec.convert(
        {**TASK, "samples": 3, "tags": {"set": "a"}, "tenant": "lab"}, Task
    )
    for query, ids in (("", ["t", "u"]), ("?tag=set=a", ["t"]), ("?tenant=default", ["u"])):
        page = (await server.ask("GET", f"/v1/tasks{query}")).json
        assert [one["id"] for one in page["tasks"]] == ids, query
    first = (await server.ask("GET", "/v1/sessions?limit=3")).json
    rest = (await server.ask("GET", f"/v1/sessions?after={first['next']}")).json
    seen = [one["id"] for one in (*first["sessions"], *rest["sessions"])]
    assert rest["next"] is None
    assert seen == ["t-0", "t-1", "t-2", "u-0"]
    assert (await server.ask("GET", "/v1/sessions/t-1")).json["sample"] == 1


async def test_what_waits_is_cancelled_at_once_and_what_runs_is_told(server: Served) -> None:
    """Cancelling a task or a session says what it met."""
    await server.submit(samples=2)
    node = await server.join()
    (work,) = (await server.lease(node, 1)).work
    response = await server.ask("POST", "/v1/tasks/t/cancel?by=me")
    (waited,) = {"t-0", "t-1"} - {work.session.id}
    assert response.json == {"ended": [waited], "stopping": [work.session.id], "final": 0}
    again = await server.ask("POST", f"/v1/sessions/{waited}/cancel")
    assert again.json == {"ended": [], "stopping": [], "final": 1}


# --------------------------------------------------------------------------- results
async def test_a_result_is_committed_once_and_read_in_every_form(server: Served) -> None:
    """View, packed trajectory, JSON trajectory; the same commit again is fine, another is not."""
    await server.submit()
    node = await server.join()
    (work,) = (await server.lease(node)).work
    sid, epoch = work.session.id, work.session.epoch
    assert (await server.ask("GET", f"/v1/sessions/{sid}/result")).status == 404
    data = result(sid, "t")
    assert (await server.commit(node, sid, epoch, data)).json == {"outcome": "committed"}
    assert (await server.commit(node, sid, epoch, data)).json == {"outcome": "already"}
    other = await server.commit(node, sid, epoch, result(sid, "t", reward=0.5))
    assert (other.status, other.problem.type[20:]) == (409, "fenced")
    view = (await server.ask("GET", f"/v1/sessions/{sid}/result")).json
    assert (view["status"], view["reward"], view["bytes"]) == ("completed", 1.0, len(data))
    packed = await server.ask("GET", f"/v1/sessions/{sid}/trajectory")
    assert (packed.headers["content-type"], packed.body) == ("application/zstd", data)
    accept = {"accept": "application/json"}
    plain = await server.ask("GET", f"/v1/sessions/{sid}/trajectory", headers=accept)
    assert plain.json["reward"]["value"] == 1.0
    accept = {"accept": "application/x-msgpack"}
    loose = await server.ask("GET", f"/v1/sessions/{sid}/trajectory", headers=accept)
    assert loose.body == zstandard.decompress(data)


async def test_a_result_names_the_version_that_it_was_leased_under(server: Served) -> None:
    """The weights that were served when it began, whatever was announced since."""
    await server.ask("POST", "/v1/weights", json={"version": 3})
    await server.submit()
    node = await server.join()
    done = (await server.lease(node, 0, 0.0)).control.generation
    (work,) = (await server.lease(node, applied=done)).work
    await server.commit(node, work.session.id, work.session.epoch, result("t-0", "t"))
    assert (await server.ask("GET", "/v1/sessions/t-0/result")).json["version"] == 3


async def test_a_recording_of_the_servers_own_node_is_shown(server: Served, tmp_path: Path) -> None:
    """The turns and texts of the last lease, before there is a result; 204 for one elsewhere."""
    await server.submit(samples=2)
    (work, _) = (await server.lease(await server.join())).work
    folder = tmp_path / "nodes" / "n" / "recordings"
    folder.mkdir(parents=True)
    small(folder).rename(folder / f"{work.session.id}.{work.session.epoch}.rec")
    response = await server.ask("GET", f"/v1/sessions/{work.session.id}/recording", "read")
    assert (response.status, response.headers["content-type"]) == (200, "application/gzip")
    block = gzip.decompress(response.body)
    output = msgspec.json.decode(block[4 : 4 + int.from_bytes(block[:4], "little")])
    assert [turn["call"] for turn in output["session"]["turns"]] == [0, 1, 2, 3, 4, 5]
    assert output["session"]["recording"] == f"{work.session.id}.{work.session.epoch}.rec"
    path = f"/v1/sessions/{work.session.id}/recording?files=true"
    packed = await server.ask("GET", path, "read")
    assert (packed.status, packed.headers["content-type"]) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(packed.body)) as archive:
        names = {member.name for member in archive}
    assert names == {file.name for file in folder.iterdir()}
    other = {"t-0", "t-1"} - {work.session.id}
    missing = await server.ask("GET", f"/v1/sessions/{other.pop()}/recording")
    assert missing.status == 204


async def test_whole_groups_are_told_with_their_results(server: Served) -> None:
    """`groups` gives each released task with all of its items."""
    await server.finish(samples=2)
    await server.submit(id="open")
    page = (await server.ask("GET", "/v1/results?groups=true")).json
    assert [one["id"] for one in page["groups"]] == ["t"]
    assert [one["session"] for one in page["items"]] == ["t-0", "t-1"]


async def test_results_can_be_had_of_some_tasks(server: Served) -> None:
    """`task` may come several times."""
    for name in ("a", "b", "c"):
        await server.finish(id=name)
    page = (await server.ask("GET", "/v1/results?task=a&task=c")).json
    assert [one["task"] for one in page["items"]] == ["a", "c"]


async def test_a_damaged_or_lost_trajectory_is_not_served(server: Served, tmp_path: Path) -> None:
    """One bit is enough; the answer names the blob, and what follows can be read."""
    await server.finish(samples=3)
    damaged = spoil(tmp_path, "t-0", "t-1")
    answers = [await server.ask("GET", f"/v1/sessions/t-{n}/trajectory", "read") for n in range(3)]
    assert [answer.status for answer in answers] == [404, 404, 200]
    assert damaged in answers[0].json["detail"]


# --------------------------------------------------------------------------- logs
async def test_a_log_is_read_from_anywhere_and_followed_to_its_end(server: Served) -> None:
    """Offset, tail, and a stream that ends with the session."""
    await server.submit()
    node = await server.join()
    (work,) = (await server.lease(node)).work
    sid, epoch = work.session.id, work.session.epoch
    add = f"/v1/sessions/{sid}/log?epoch={epoch}&offset="
    assert (await server.ask("POST", add + "0", node.token, data=b"one\n")).json == {"length": 4}
    path = f"/v1/sessions/{sid}/log"
    assert (await server.ask("GET", path)).body == b"one\n"
    tail = await server.ask("GET", path + "?tail=2")
    assert (tail.body, tail.headers["tugline-offset"]) == (b"e\n", "2")
    async with server.request("GET", path + "?follow=true") as got:
        assert await got.content.readline() == b"one\n"
        await server.ask("POST", add + "4", node.token, data=b"two\n")
        assert await got.content.readline() == b"two\n"
        await server.commit(node, sid, epoch, result(sid, "t"))
        assert await got.content.read() == b""
    assert (await server.ask("GET", path + "?offset=4")).body == b"two\n"


async def test_what_is_kept_is_for_its_user_only(server: Served, tmp_path: Path) -> None:
    """Store, trajectories and logs hold the work of all tenants: other users cannot read them."""
    await server.submit()
    node = await server.join()
    (work,) = (await server.lease(node)).work
    epoch = work.session.epoch
    log = f"/v1/sessions/t-0/log?epoch={epoch}&offset=0"
    assert (await server.ask("POST", log, node.token, data=b"one")).status == 200
    assert (await server.commit(node, "t-0", epoch, result("t-0", "t"))).status == 200
    kept = [tmp_path / name for name in ("tugline.db", "tugline.db-wal", "blobs", "logs")]
    assert [f"{path.name} {path.stat().st_mode & 0o77:o}" for path in kept] == [
        f"{path.name} 0" for path in kept
    ]


# --------------------------------------------------------------------------- nodes and weights
async def test_a_node_joins_works_and_goes(server: Served) -> None:
    """Join, lease, renew, hand back, drain."""
    await server.submit()
    node = await server.join("worker")
    (seen,) = (await server.ask("GET", "/v1/nodes", "read")).json
    assert (seen["name"], seen["state"], seen["slots"]) == ("worker", "live", 8)
    (work,) = (await server.lease(node)).work
    held = [[work.session.id, work.session.epoch, "run"]]
    held = [{"session": s, "epoch": e, "status": st} for s, e, st in held]
    renewed = await server.ask(
        "POST", f"/v1/nodes/{node.node}/renew", node.token, json={"held": held}
    )
    assert renewed.json["stop"] == []
    back = {"epoch": work.session.epoch, "reason": "it drains"}
    path = f"/v1/sessions/{work.session.id}/release"
    assert (await server.ask("POST", path, node.token, json=back)).status == 204
    assert (await server.ask("GET", "/v1/sessions/t-0")).json["status"] == "queued"
    assert (await server.ask("POST", f"/v1/nodes/{node.node}/drain")).status == 204
    assert (await server.lease(node, wait_s=0)).draining


async def test_weights_are_a_barrier_for_all_nodes(server: Served) -> None:
    """Pause waits for the nodes; who did not answer is named."""
    node = await server.join("slow")
    paused = await server.ask("POST", "/v1/weights/pause", json={"within_s": 0.05})
    assert (paused.json["paused"], paused.json["missing"]) == ("wait", ["slow"])
    body = {"capacity": 0, "applied": paused.json["generation"], "wait_s": 0}
    await server.ask("POST", f"/v1/nodes/{node.node}/lease", node.token, json=body)
    again = await server.ask("POST", "/v1/weights/pause", json={"within_s": 0.05})
    assert again.status == 200
    control = (await server.ask("GET", "/v1/weights", "read")).json
    assert control["paused"] == "wait"


# --------------------------------------------------------------------------- the server
async def test_the_server_tells_how_it_is(server: Served) -> None:
    """Health without a token, status and metrics with one."""
    await server.submit(samples=2)
    assert (await server.ask("GET", "/healthz", None)).json == {"status": "ok"}
    counts = (await server.ask("GET", "/v1/status", "read")).json
    assert (counts["tasks_open"], counts["sessions"]) == (1, {"queued": 2})
    page = (await server.ask("GET", "/metrics", "read")).body.decode()
    assert 'route="GET /v1/status"' in page


async def test_a_store_that_cannot_be_used_is_503_and_a_fault_names_its_id(
    server: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are problems; the one says when to come again, the other what to look for in the log."""

    def full(_tx: Tx) -> None:
        msg = "the disk is full"
        raise StoreError(msg)

    def broken(_tx: Tx) -> None:
        msg = "secret detail"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr(stats, "counts", full)
    monkeypatch.setattr(nodes, "list_views", broken)
    response = await server.ask("GET", "/v1/status")
    assert (response.status, response.problem.type[20:]) == (503, "unavailable")
    assert response.headers["retry-after"] == "1"
    response = await server.ask("GET", "/v1/nodes")
    assert (response.status, "secret" in response.problem.detail) == (500, False)
    logged = capsys.readouterr().out
    assert response.problem.detail.split()[-1] in logged
    assert "secret detail" in logged
    assert TOKENS.client not in logged


def test_every_route_and_problem_is_documented() -> None:
    """docs/api.md has each route with its tokens, and each problem with its status."""
    page = DOCS.read_text(encoding="utf-8")
    for route in ROUTES:
        rows = [
            row for row in page.splitlines() if row.startswith(f"| `{route.method} {route.path}`")
        ]
        assert len(rows) == 1, f"{route.method} {route.path}"
        tokens = rows[0].split("|")[2].strip()
        assert set(tokens.split(", ")) == {str(role) for role in route.roles} or tokens == "none"
    for name, (status, _) in PROBLEMS.items():
        assert f"| `{name}` | {status} |" in page
    assert Problem(type="", title="", status=1, detail="").known == ()
