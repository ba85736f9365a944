"""The routes with a real control plane behind them."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from recording.view.synthetic import small
from support.deployment import read_samples
from support.server import TASK, TOKENS, Answer, RunningServer, encode_result
from tugline.errors import StoreError
from tugline.protocol.clients import PROBLEM
from tugline.recording.file import MAGIC
from tugline.server.http.app import ROUTES
from tugline.server.http.route import PROBLEMS
from tugline.server.store import nodes, stats
from tugline.server.store.base import Tx
from tugline.types import Task

DOCS = Path(__file__).resolve().parents[3] / "docs" / "api.md"


# --------------------------------------------------------------------------- tasks and sessions


async def test_a_task_is_submitted_once(server_of_each: RunningServer) -> None:
    """The status is 201 the first time, 200 for a repetition, and 409 for a conflict.

    One conflict in a batch refuses all of it.
    """
    server = server_of_each
    first = await server.ask("POST", "/v1/tasks", json=[TASK, TASK])
    accepted = {"task": "t", "sessions": ["t-0"], "new": True}
    assert (first.status, first.json) == (201, [accepted, accepted])
    again = await server.ask("POST", "/v1/tasks", json=TASK)
    assert (again.status, again.json[0]["new"]) == (200, False)
    batch = [*({**TASK, "id": f"b{n}"} for n in range(999)), {**TASK, "instruction": "other"}]
    other = await server.ask("POST", "/v1/tasks", json=batch)
    assert (*other.refusal, other.problem.field) == (409, "conflict", "999.id")
    assert "'t' was already submitted with different content" in other.problem.detail
    assert (await server.ask("GET", "/v1/tasks/b0")).status == 404
    assert len((await server.ask("POST", "/v1/tasks", json=batch[:-1])).json) == 999


async def test_tasks_and_sessions_can_be_read(server: RunningServer) -> None:
    """A task has its state, its body as submitted, and its sessions."""
    changes = {"samples": 3, "tags": {"set": "a"}, "tenant": "lab"}
    await server.submit(**changes)
    task = (await server.ask("GET", "/v1/tasks/t", "read")).json
    assert (task["state"], task["counts"], task["tenant"]) == ("open", {"queued": 3}, "lab")
    body = msgspec.json.decode((await server.ask("GET", "/v1/tasks/t/body")).body, type=Task)
    assert body == msgspec.convert({**TASK, **changes}, Task)
    assert (await server.ask("GET", "/v1/sessions/t-1")).json["sample"] == 1


# --------------------------------------------------------------------------- results
async def test_a_result_is_committed_once_and_read_in_every_form(server: RunningServer) -> None:
    """Repeating a commit is fine, another result is not; every form has the trajectory.

    The trajectory's version is that of the weights when its session was leased.
    """
    await server.ask("POST", "/v1/weights", json={"version": 3})
    node, epoch = await server.start()
    assert (await server.ask("GET", "/v1/sessions/t-0/result")).status == 404
    data = encode_result("t-0", "t")
    assert (await server.commit(node, "t-0", epoch, data)).json == {"outcome": "committed"}
    assert (await server.commit(node, "t-0", epoch, data)).json == {"outcome": "already"}
    other = await server.commit(node, "t-0", epoch, encode_result("t-0", "t", reward=0.5))
    assert other.refusal == (409, "fenced")
    view = (await server.ask("GET", "/v1/sessions/t-0/result")).json
    expected = {"status": "completed", "reward": 1.0, "bytes": len(data), "version": 3}
    assert view.items() >= expected.items()

    async def fetch(**headers: str) -> Answer:
        return await server.ask("GET", "/v1/sessions/t-0/trajectory", headers=headers)

    packed = await fetch()
    assert (packed.headers["content-type"], packed.body) == ("application/zstd", data)
    assert (await fetch(accept="application/json")).json["reward"]["value"] == 1.0
    assert (await fetch(accept="application/x-msgpack")).body == zstandard.decompress(data)


async def test_local_recordings_can_be_read(server: RunningServer, tmp_path: Path) -> None:
    """The recording of the last lease can be read before the result; other nodes' are a 204."""
    _, epoch = await server.start(samples=2)
    folder = tmp_path / "nodes" / "n" / "recordings"
    folder.mkdir(parents=True)
    small(folder).rename(folder / f"t-0.{epoch}.rec")
    path = "/v1/sessions/t-0/recording"
    response = await server.ask("GET", path, "read")
    assert (response.status, response.headers["content-type"]) == (200, "application/gzip")
    block = gzip.decompress(response.body)
    view = msgspec.json.decode(block[4 : 4 + int.from_bytes(block[:4], "little")])["session"]
    assert [turn["call"] for turn in view["turns"]] == [0, 1, 2, 3, 4, 5]
    assert view["recording"] == f"t-0.{epoch}.rec"
    packed = await server.ask("GET", f"{path}?files=true", "read")
    assert (packed.status, packed.headers["content-type"]) == (200, "application/x-tar")
    with tarfile.open(fileobj=io.BytesIO(packed.body)) as archive:
        assert set(archive.getnames()) == {file.name for file in folder.iterdir()}
    assert (await server.ask("GET", "/v1/sessions/t-1/recording")).status == 204
    recording = folder / f"t-0.{epoch}.rec"
    data = recording.read_bytes()
    recording.write_bytes(data[: len(MAGIC) - 1] + b"\x03" + data[len(MAGIC) :])
    response = await server.ask("GET", path, "read")
    assert (response.status, response.json["type"]) == (409, f"{PROBLEM}recording-version")
    assert "has version 3" in response.json["detail"]


async def test_files_of_the_server_are_private(server: RunningServer, tmp_path: Path) -> None:
    """Store, trajectories and logs are not readable by other users."""
    node, epoch = await server.start()
    assert (await server.write_log(node, epoch, b"one")).status == 200
    assert (await server.commit(node, "t-0", epoch, encode_result("t-0", "t"))).status == 200
    for name in ("tugline.db", "tugline.db-wal", "blobs", "logs"):
        assert (tmp_path / name).stat().st_mode & 0o77 == 0, name


# --------------------------------------------------------------------------- nodes
async def test_a_node_over_http(server: RunningServer) -> None:
    """A node registers, leases, renews, releases and drains over HTTP."""
    node, epoch = await server.start("worker")
    (seen,) = (await server.ask("GET", "/v1/nodes", "read")).json
    expected = {"name": "worker", "state": "live", "slots": 8, "running": 1}
    assert seen.items() >= expected.items()
    held = {"held": [{"session": "t-0", "epoch": epoch, "status": "run"}]}
    renewed = await server.ask("POST", f"/v1/nodes/{node.node}/renew", node.token, json=held)
    assert renewed.json["stop"] == []
    back, path = {"epoch": epoch, "reason": "it drains"}, "/v1/sessions/t-0/release"
    assert (await server.ask("POST", path, node.token, json=back)).status == 204
    assert (await server.ask("GET", "/v1/sessions/t-0")).json["status"] == "queued"
    assert (await server.ask("POST", f"/v1/nodes/{node.node}/drain")).status == 204
    assert (await server.lease(node, wait_s=0)).draining


# --------------------------------------------------------------------------- the server
async def test_health_status_and_metrics(server: RunningServer) -> None:
    """Health needs no token, status and metrics do; requests are counted by route."""
    await server.submit(samples=2)
    await server.join()
    assert (await server.ask("GET", "/healthz", None)).json == {"status": "ok"}
    counts = (await server.ask("GET", "/v1/status", "read")).json
    assert (counts["tasks_open"], counts["sessions"]) == (1, {"queued": 2})
    assert (counts["nodes"], counts["slots"]) == (1, 8)
    for name in ("t", "none"):
        await server.ask("GET", f"/v1/tasks/{name}")
    page = (await server.ask("GET", "/metrics", "read")).body
    requests = read_samples(page)["tugline_http_seconds_count"]
    task = {key: count for key, count in requests.items() if "/v1/tasks/" in key[0]}
    assert task == {("GET /v1/tasks/{id}", "2xx"): 1, ("GET /v1/tasks/{id}", "4xx"): 1}


async def test_store_errors_are_503_and_faults_are_500(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 503 has a time to retry; a 500 names the log entry, and both hide the error's text."""

    def fail(error: Exception) -> Callable[[Tx], None]:
        def op(_tx: Tx) -> None:
            raise error

        return op

    monkeypatch.setattr(stats, "counts", fail(StoreError("the disk is full")))
    monkeypatch.setattr(nodes, "list_views", fail(ZeroDivisionError("secret detail")))
    response = await server.ask("GET", "/v1/status")
    assert response.refusal == (503, "unavailable")
    assert response.headers["retry-after"] == "1"
    response = await server.ask("GET", "/v1/nodes")
    assert (response.status, "secret" in response.problem.detail) == (500, False)
    logged = capsys.readouterr().out
    assert response.problem.detail.split()[-1] in logged
    assert "ZeroDivisionError" in logged
    assert "secret detail" not in logged.replace('"secret detail"', "")
    assert TOKENS.client not in logged


def test_every_route_and_problem_is_documented() -> None:
    """docs/api.md has each route with its tokens, and each problem with its status."""
    page = DOCS.read_text(encoding="utf-8")
    for route in ROUTES:
        begins = f"| `{route.name}`"
        (row,) = [row for row in page.splitlines() if row.startswith(begins)]
        tokens = row.split("|")[2].strip()
        assert set(tokens.split(", ")) == {str(role) for role in route.roles} or tokens == "none"
    for name, (status, _) in PROBLEMS.items():
        assert f"| `{name}` | {status} |" in page
