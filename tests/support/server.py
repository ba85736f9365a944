"""A real control plane on SQLite behind a real socket, requests to it, and nodes at work on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import zstandard

from tugline.client.api import Client
from tugline.client.nodes import NodeClient
from tugline.protocol import (
    PROBLEM,
    HeldSession,
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    Problem,
    Work,
)
from tugline.server.blobs import open_blobs
from tugline.server.control import ControlPlane
from tugline.server.http.app import Api, serve_api
from tugline.server.http.route import Tokens
from tugline.server.metrics import ServerMetrics
from tugline.server.settings import ServerSettings
from tugline.server.store.database import open_database
from tugline.server.validation import check_task
from tugline.types import Ledger, Reward, Status, Task, Trajectory, encode

TOKENS = Tokens(client="client-token", join="join-token", read="read-token")
TASK = {
    "id": "t",
    "instruction": "do",
    "harness": {"name": "shell"},
    "evaluator": {"name": "tests"},
}


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return msgspec.json.decode(self.body)

    @property
    def problem(self) -> Problem:
        """The body of an error, which must be one."""
        assert self.headers["content-type"] == "application/problem+json"
        return msgspec.json.decode(self.body, type=Problem)

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and name of the problem."""
        return self.status, self.problem.type.removeprefix(PROBLEM)


@dataclass
class RunningServer:
    """A server and a client of it."""

    url: str
    app: Api
    control: ControlPlane
    http: aiohttp.ClientSession

    def request(self, method: str, path: str, key: str | None = "client", **how: Any) -> Any:
        """A request as a context manager; `key` is a role's name or a token."""
        known = {name: getattr(TOKENS, name) for name in ("client", "join", "read")}
        headers = dict(how.pop("headers", {}))
        if key is not None:
            headers["authorization"] = f"Bearer {known.get(key, key)}"
        return self.http.request(method, self.url + path, headers=headers, **how)

    async def ask(self, method: str, path: str, key: str | None = "client", **how: Any) -> Answer:
        """Send a request and read its whole response."""
        async with self.request(method, path, key, **how) as got:
            headers = {name.lower(): value for name, value in got.headers.items()}
            return Answer(got.status, headers, await got.read())

    async def submit(self, run: str = "", /, **changes: Any) -> Any:
        """Submit a task, to a run if it is given; returns the response's body."""
        path = f"/v1/tasks?run={run}" if run else "/v1/tasks"
        response = await self.ask("POST", path, json={**TASK, **changes})
        assert response.status in {200, 201}, response
        return response.json

    async def join(self, name: str = "n") -> NodeRegistered:
        """Register a new node."""
        hello = msgspec.to_builtins(NodeRegistration(name=name, slots=8, capacity=8))
        response = await self.ask("POST", "/v1/nodes", "join", json=hello)
        assert response.status == 201, response
        return msgspec.json.decode(response.body, type=NodeRegistered)

    async def lease(
        self, node: NodeRegistered, room: int = 8, wait_s: float = 10.0, applied: int | None = None
    ) -> LeaseResponse:
        """Lease work for a node, waiting for it; at once if there are orders after `applied`."""
        known = node.control.generation if applied is None else applied
        how = {"capacity": room, "wait_s": wait_s, "applied": known}
        response = await self.ask("POST", f"/v1/nodes/{node.node}/lease", node.token, json=how)
        assert response.status == 200, response
        return msgspec.json.decode(response.body, type=LeaseResponse)

    async def start(self, name: str = "n", **changes: Any) -> tuple[NodeRegistered, int]:
        """Submit a task and lease its first session to a new node; the node, and the epoch."""
        await self.submit(**changes)
        node = await self.join(name)
        (work,) = (await self.lease(node, 1)).work
        return node, work.session.epoch

    async def write_log(
        self, node: NodeRegistered, epoch: int, data: bytes, *, offset: int = 0
    ) -> Answer:
        """Append to the log of session ``t-0``."""
        path = f"/v1/sessions/t-0/log?epoch={epoch}&offset={offset}"
        return await self.ask("POST", path, node.token, data=data)

    async def commit(self, node: NodeRegistered, session: str, epoch: int, data: bytes) -> Answer:
        """Commit a result."""
        path = f"/v1/sessions/{session}/result?epoch={epoch}"
        return await self.ask("POST", path, node.token, data=data)

    async def finish(self, **changes: Any) -> list[str]:
        """Submit a task and commit all its sessions; returns their ids."""
        (accepted,) = await self.submit(**changes)
        node = await self.join()
        work = (await self.lease(node, len(accepted["sessions"]))).work
        for one in work:
            data = encode_result(one.session.id, one.task.id, one.session.sample)
            response = await self.commit(node, one.session.id, one.session.epoch, data)
            assert response.json == {"outcome": "committed"}, response
        return [one.session.id for one in work]


def encode_result(
    session: str, task: str, sample: int = 0, reward: float | None = 1.0, **fields: Any
) -> bytes:
    """An encoded trajectory, as its node sends it."""
    rest = {"status": Status.COMPLETED, "traces": (), "ledger": Ledger(), **fields}
    verdict = None if reward is None else Reward(reward)
    trajectory = Trajectory(session=session, task=task, sample=sample, reward=verdict, **rest)
    return zstandard.compress(encode(trajectory))


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_results(folder: Path, damaged: str, lost: str) -> str:
    """Flip a bit of one session's result and remove another's; the name of the first."""
    next(folder.rglob(f"{lost}.*")).unlink()
    path = next(folder.rglob(f"{damaged}.*"))
    flip_bit(path)
    return path.name


def make_control(
    store: str,
    folder: Path,
    *,
    clock: Callable[[], float] | None = None,
    check: Callable[[Task], None] = lambda _task: None,
    **settings: Any,
) -> ControlPlane:
    """A control plane with all its files in a folder; by default it accepts any task."""
    parts = open_database(store, clock=clock), open_blobs(str(folder / "blobs"))
    return ControlPlane(*parts, folder=folder, check=check, settings=ServerSettings(**settings))


@contextlib.asynccontextmanager
async def serve(
    store: str, folder: Path, *, port: int = 0, **settings: Any
) -> AsyncIterator[RunningServer]:
    """A server with metrics, and a client of it."""
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        make_control(store, folder, check=check_task, **settings) as control,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        app = Api(control, TOKENS, ServerMetrics(control.database))
        async with serve_api(app, port=port) as url:
            yield RunningServer(url, app, control, http)


class RestartableServer:
    """A server that can be stopped and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url, self.port = folder, "", 0
        self.control: ControlPlane
        self.app: Api
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start it with what is in the folder."""
        store = f"sqlite:{self.folder / 'server.db'}"
        server = await self._stack.enter_async_context(
            serve(store, self.folder, port=self.port, lease_s=10.0)
        )
        self.url, self.app, self.control = server.url, server.app, server.control
        self.port = int(self.url.rpartition(":")[2])

    async def stop(self) -> None:
        """Stop it and close all connections."""
        await self._stack.aclose()

    def client(self, **how: float) -> Client:
        """A client that may submit."""
        return Client(self.url, TOKENS.client, **how)

    async def finish(self, *, limit: int = 100, wait_s: float = 5.0, **rewards: float) -> list[str]:
        """Finish queued sessions as a node; `rewards` by session, with ``_`` for ``-``."""
        async with lease_sessions(self.url, limit, wait_s) as (node, _, *work):
            for one in work:
                await commit(node, one, rewards.get(one.session.id.replace("-", "_"), 1.0))
            return [one.session.id for one in work]


@contextlib.asynccontextmanager
async def lease_sessions(
    url: str, room: int = 1, wait_s: float = 5.0
) -> AsyncIterator[tuple[NodeClient, str, *tuple[Work, ...]]]:
    """Lease queued sessions as a node; its connection, its id, and the sessions."""
    async with NodeClient(url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="n", slots=room, capacity=room))
        ask = LeaseRequest(capacity=room, applied=welcome.control.generation, wait_s=wait_s)
        yield node, welcome.node, *(await node.lease(welcome.node, ask)).work


async def commit(
    node: NodeClient, work: Work, reward: float = 1.0, patch: str = "", **fields: Any
) -> None:
    """Commit a result of this session."""
    of = work.session
    data = encode_result(of.id, of.task, of.sample, reward, patch=patch, **fields)
    await node.commit(of.id, of.epoch, data)


def list_held(*work: Work) -> tuple[HeldSession, ...]:
    """Sessions as a node reports them."""
    return tuple(HeldSession(one.session.id, one.session.epoch, Status.RUN) for one in work)
