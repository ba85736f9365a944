"""Server, gateway and node in one process, without an API: run tasks and return their results.

Server and node use the same calls and code as between machines, without a socket: sessions are
leased with an epoch and committed once (I3). When the node registers again, the sessions of an
earlier process of the same folder are queued again, so a killed run continues with exactly the
sessions that have no result yet.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from tugline import log
from tugline.errors import Missing, ServerError
from tugline.launch.engine import EngineConnection, share_engine
from tugline.launch.node import RECORDINGS, open_node
from tugline.launch.node_watch import NodeWatch
from tugline.launch.processes import NODES, divide, keep_nodes
from tugline.launch.server import open_control_plane, serve_control_plane
from tugline.launch.settings import Settings
from tugline.launch.tokens import load_tokens
from tugline.protocol import Control, ResultQuery, ResultView, RunKind, RunStart, RunStep, RunView
from tugline.recording import file as recordings
from tugline.recording.folder import file_name
from tugline.recording.trajectories import unpack
from tugline.server.control import ControlPlane
from tugline.server.store import nodes, results, runs, sessions
from tugline.server.store.base import Tx
from tugline.server.store.sessions import SessionRow
from tugline.types import Call, Task, Trajectory

_STOP_S = 30.0
"""Seconds that sessions may take to end when the run is stopped."""
_FOR_EVER_S = 1e9
_UNLIMITED_GB = 1e9
"""The recordings of a run are kept with it."""
_BATCH = 1000
_WAIT_S = 1.0
"""Seconds without a result after which the nodes are checked."""

_log = log.get("launch")
OnDone = Callable[[int, int], None]
"""Callback with the number of finished sessions of the batch, and of all its sessions."""


class LocalServer:
    """Server and nodes of `open_local`, for any number of batches of tasks."""

    def __init__(
        self,
        control: ControlPlane,
        running: asyncio.Task[None],
        recordings: Sequence[Path],
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        """`running` ends when there are no nodes any more; `recordings` are their folders.

        `is_idle` says whether no model call runs in this process.
        """
        self.control = control
        self.run_name: str | None = None
        """Registered run that submitted tasks belong to."""
        self.url: str | None = None
        """Address of the API, if it is served."""
        self.is_idle = is_idle
        self._running = running
        self._recordings = recordings
        self.watch = NodeWatch()

    async def start_run(
        self,
        name: str,
        kind: RunKind,
        configuration: Mapping[str, Any],
        *,
        parent: str | None = None,
        by: str = "",
    ) -> RunView:
        """Register a run, or continue it. Raises `Conflict` for a run of another kind."""
        given = RunStart(kind=kind, configuration=dict(configuration), parent=parent, by=by)
        return await self.control.database.write(runs.start, name, given)

    async def end_run(self, name: str) -> RunView:
        """Record that a run has ended. Raises `Missing`."""
        return await self.control.database.write(runs.end, name)

    async def report_step(
        self,
        run: str,
        step: int,
        figures: Mapping[str, float] = MappingProxyType({}),
        *,
        notes: Mapping[str, str] = MappingProxyType({}),
        rewound: bool = False,
    ) -> None:
        """Store figures and notes of a step, as `Client.report_step` does."""
        report = RunStep(step=step, figures=dict(figures), notes=dict(notes), rewound=rewound)
        await self.control.database.write(runs.report_step, run, report)

    async def weights(self) -> Control:
        """Read the newest weight version, and whether model calls are paused."""
        return await self.control.database.read(nodes.control)

    async def run(
        self, tasks: Sequence[Task], on_done: OnDone = lambda _done, _total: None
    ) -> list[Trajectory]:
        """Run all samples of `tasks` that have no result; return the results of all."""
        submitted = await self.submit(tasks)
        done = 0
        on_done(done, len(submitted))
        async for _ in self.follow(submitted, tasks=[task.id for task in tasks]):
            done += 1
            on_done(done, len(submitted))
        return await self.load_results([task.id for task in tasks])

    async def submit(self, tasks: Sequence[Task]) -> frozenset[str]:
        """Submit `tasks`; return their sessions. Raises `Invalid` and `Conflict`."""
        accepted_sessions: set[str] = set()
        for start in range(0, len(tasks), _BATCH):
            batch = tasks[start : start + _BATCH]
            for accepted in await self.control.submit(batch, self.run_name):
                accepted_sessions.update(accepted.sessions)
        return frozenset(accepted_sessions)

    async def run_again(self, tasks: Sequence[str]) -> frozenset[str]:
        """Queue the sessions that ended for a reason outside the policy again; return them."""
        again: set[str] = set()
        for task in tasks:
            again.update(await self.control.database.write(results.run_again, task, "resume"))
        return frozenset(again)

    async def follow(
        self, sessions: Collection[str], *, tasks: Sequence[str] | None = None
    ) -> AsyncIterator[ResultView]:
        """Yield the results of `sessions` as they arrive, existing results first.

        `tasks` are the tasks of `sessions`; give them to read only a part of the results.
        """
        cursor = 0
        missing = set(sessions)
        while missing:
            query = ResultQuery(after=cursor, limit=_BATCH, wait_s=_WAIT_S, task=tuple(tasks or ()))
            page = await self.control.results(query)
            if self._running.done() and not page.items:  # there will be no further results
                error = None if self._running.cancelled() else self._running.exception()
                msg = "the node has stopped; run the sessions without a result again"
                raise ServerError(msg) from error
            if not page.items:
                await self.watch.check(self.control.database)
            cursor = page.cursor
            for view in page.items:
                self.watch.note_result(view)
                if view.session in missing:
                    missing.remove(view.session)
                    yield view

    async def load_results(self, tasks: Sequence[str]) -> list[Trajectory]:
        """Return existing trajectories of these tasks, in order of tasks and samples."""
        packed = []
        for session in await self.list_sessions(tasks):
            with contextlib.suppress(Missing):  # the session runs, or was cancelled before it ran
                packed.append(await self.control.trajectory(session.id))
        return await asyncio.to_thread(lambda: [unpack(data) for data in packed])

    async def list_sessions(self, tasks: Sequence[str]) -> list[SessionRow]:
        """Return the sessions of these tasks, in order of tasks and samples."""

        def read(tx: Tx) -> list[SessionRow]:
            order = "task = :task ORDER BY sample"
            return [row for task in tasks for row in sessions.select(tx, order, task=task)]

        return await self.control.database.read(read)

    async def find_recordings(self, tasks: Sequence[str]) -> dict[str, Path]:
        """Return the recording of each session's last attempt; sessions without calls have none."""
        rows = await self.list_sessions(tasks)
        names = {row.id: file_name(row.session()) for row in rows}
        return {
            session: folder / name
            for session, name in names.items()
            for folder in self._recordings
            if (folder / name).exists()
        }

    async def read_calls(self, tasks: Sequence[str]) -> list[Call]:
        """Return the calls of each session's last attempt, in order of tasks and samples."""
        paths = await self.find_recordings(tasks)
        return await asyncio.to_thread(
            lambda: [call for path in paths.values() for call in recordings.read(path).calls]
        )


@contextlib.asynccontextmanager
async def open_local(
    settings: Settings, folder: Path, engine: EngineConnection, *, serve: bool = False
) -> AsyncIterator[LocalServer]:
    """Open a server in `folder`, with a node in this process or with ``node.processes``.

    With `serve`, its API and console are served on loopback.
    """
    if settings.node.processes is not None:
        async with _open_with_processes(settings, folder, engine) as local:
            yield local
        return
    async with (
        open_control_plane(settings.server, folder) as control,
        open_node(settings, folder, control.dispatcher, engine, keep_recordings=True) as (node, _),
        serve_control_plane(control, settings.server, folder)
        if serve
        else contextlib.nullcontext((None, None)) as (url, _),
    ):
        running = asyncio.create_task(node.run(), name="node")
        local = LocalServer(control, running, [folder / RECORDINGS], lambda: node.gateway.idle)
        local.url = url
        try:
            yield local
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=_STOP_S)


@contextlib.asynccontextmanager
async def _open_with_processes(
    settings: Settings, folder: Path, engine: EngineConnection
) -> AsyncIterator[LocalServer]:
    """Open a server with an API for the nodes, on loopback."""
    server = replace(settings.server, host="127.0.0.1", port=0)
    node = replace(settings.node, keep_s=_FOR_EVER_S, quota_gb=_UNLIMITED_GB)
    shared = await asyncio.to_thread(share_engine, engine, settings.engine, folder)
    nodes = divide(replace(settings, node=node, engine=shared), settings.node.name)
    async with (
        open_control_plane(server, folder) as control,
        serve_control_plane(control, server, folder) as (url, _),
    ):
        token = load_tokens(folder).join
        keeping = keep_nodes(nodes, folder, url, token, asyncio.Event(), _log.warning)
        running = asyncio.create_task(keeping, name="nodes")
        try:
            folders = [folder / NODES / each.node.name / RECORDINGS for each in nodes]
            local = LocalServer(control, running, folders)
            local.url = url
            yield local
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=_STOP_S)
