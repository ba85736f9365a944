"""Server, gateway and node in one process, without an API: run these tasks, return their results.

The same calls as between machines go through the same code, without a socket: sessions are leased
with an epoch and committed once (I3). What an earlier process of the same folder left behind is
taken back when the node registers again, so a killed run continues with exactly the sessions that
have no result yet.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import structlog
import uvloop
from msgspec.structs import replace

from tugline import log
from tugline.client.streams import Result
from tugline.errors import Missing, ServerError
from tugline.gateway.app import Gateway
from tugline.launch.engine import EngineConnection, open_engine
from tugline.launch.node import open_node
from tugline.launch.server import folder_lock, managed_gc, open_control_plane
from tugline.launch.settings import Settings, load_settings
from tugline.protocol import Control, ResultQuery, ResultView
from tugline.recording.trajectories import ResultFolder, unpack
from tugline.server.control import ControlPlane
from tugline.server.store import nodes, sessions
from tugline.server.store.base import Tx
from tugline.server.store.sessions import SessionRow
from tugline.types import Task, Trajectory
from tugline.web.serve import raise_file_limit

_STOP_S = 30.0
"""How long sessions may take to end when the run is stopped."""
_BATCH = 1000
_WAIT_S = 1.0
"""After so long without a result, it is checked that the node still runs."""

OnDone = Callable[[int, int], None]
"""Called with the number of sessions of the batch that are done, and of all."""
OnResult = Callable[[ResultView, int], None]
"""Called with each result, those of an earlier run first, and the number of sessions."""


class LocalServer:
    """What `open_local` yields; may be used for one batch of tasks after the other."""

    def __init__(
        self, control: ControlPlane, gateway: Gateway, running_node: asyncio.Task[None]
    ) -> None:
        self.control, self.gateway = control, gateway
        self._node = running_node

    async def weights(self) -> Control:
        """Read the newest weight version, and whether model calls are paused."""
        return await self.control.database.read(nodes.control)

    async def run(
        self, tasks: Sequence[Task], on_done: OnDone = lambda _done, _total: None
    ) -> list[Trajectory]:
        """Results of all samples of `tasks`; those that have one already are not run again."""
        submitted = await self.submit(tasks)
        done = 0
        on_done(done, len(submitted))
        async for _ in self.follow(submitted, tasks=[task.id for task in tasks]):
            done += 1
            on_done(done, len(submitted))
        return await self.load_results([task.id for task in tasks])

    async def submit(self, tasks: Sequence[Task]) -> frozenset[str]:
        """Submit `tasks`; returns their sessions. Raises `Invalid` and `Conflict`."""
        accepted_sessions: set[str] = set()
        for start in range(0, len(tasks), _BATCH):
            for accepted in await self.control.submit(tasks[start : start + _BATCH]):
                accepted_sessions.update(accepted.sessions)
        return frozenset(accepted_sessions)

    async def follow(
        self, sessions: Collection[str], *, tasks: Sequence[str] | None = None
    ) -> AsyncIterator[ResultView]:
        """The result of each of `sessions` as it comes, existing ones first.

        `tasks` are theirs, where only few of all tasks are followed.
        """
        cursor, missing = 0, set(sessions)
        while missing:
            query = ResultQuery(after=cursor, limit=_BATCH, wait_s=_WAIT_S, task=tuple(tasks or ()))
            page = await self.control.results(query)
            if self._node.done() and not page.items:  # then there would never be one
                error = None if self._node.cancelled() else self._node.exception()
                msg = "the node has stopped; what is missing can be run again"
                raise ServerError(msg) from error
            cursor = page.cursor
            for view in page.items:
                if view.session in missing:
                    missing.remove(view.session)
                    yield view

    async def load_results(self, tasks: Sequence[str]) -> list[Trajectory]:
        """Existing trajectories of these tasks, in their order and that of their samples."""
        packed = []
        for session in await self.list_sessions(tasks):
            with contextlib.suppress(Missing):  # it runs, or was cancelled before it ran
                packed.append(await self.control.trajectory(session.id))
        return await asyncio.to_thread(lambda: [unpack(one) for one in packed])

    async def list_sessions(self, tasks: Sequence[str]) -> list[SessionRow]:
        """The sessions of these tasks, in their order and that of their samples."""

        def read(tx: Tx) -> list[SessionRow]:
            order = "task = :task ORDER BY sample"
            return [row for task in tasks for row in sessions.select(tx, order, task=task)]

        return await self.control.database.read(read)

    async def find_recordings(self, tasks: Sequence[str]) -> dict[str, Path]:
        """Session to the recording of its last attempt, if it made any calls."""
        paths = {
            one.id: self.gateway.recording_path(one.session())
            for one in await self.list_sessions(tasks)
        }
        return {session: path for session, path in paths.items() if path.exists()}


@contextlib.asynccontextmanager
async def open_local(
    settings: Settings, folder: Path, engine: EngineConnection
) -> AsyncIterator[LocalServer]:
    """Server, gateway and node in `folder`, in front of an engine."""
    async with (
        open_control_plane(settings.server, folder) as control,
        open_node(settings, folder, control.dispatcher, engine, keep_recordings=True) as (node, _),
    ):
        running = asyncio.create_task(node.run(), name="node")
        try:
            yield LocalServer(control, node.gateway, running)
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=_STOP_S)


def run(tasks: Task | Sequence[Task], **options: Any) -> list[Result]:
    """Run tasks in this process until all are done; the options are those of `run_async`."""
    return uvloop.run(run_async(tasks, **options))


async def run_async(
    tasks: Task | Sequence[Task],
    *,
    engine: str | None = None,
    slots: int | None = None,
    config: Path | str | None = None,
    out: Path | str | None = None,
) -> list[Result]:
    """Run tasks in this process; results in the order of the tasks and their samples.

    `engine` is its address, `config` a file with any setting. Without `out` the folder of the run
    is a temporary one. Warnings go to stderr, unless the program has configured structlog. Raises
    what `run_in_folder` does, and `EngineError`.
    """
    if not structlog.is_configured():
        log.configure()
    tasks = [tasks] if isinstance(tasks, Task) else tasks
    file, urls = None if config is None else Path(config), None if engine is None else [engine]
    settings = load_settings(file, server={}, node={"slots": slots}, engine={"urls": urls})
    order = {task.id: number for number, task in enumerate(tasks)}
    with tempfile.TemporaryDirectory(prefix="tugline-") as temporary:
        folder = Path(out or temporary)
        views = await run_in_folder(tasks, settings, folder, lambda _view, _total: None)
        path = ResultFolder(folder).path
        return [
            Result(view, path(view.session).read_bytes() if view.bytes else b"")
            for view in sorted(views, key=lambda view: (order[view.task], view.sample))
        ]


async def run_in_folder(
    tasks: Sequence[Task], settings: Settings, folder: Path, on_result: OnResult
) -> list[ResultView]:
    """Run all samples of `tasks` and save their results in `folder`.

    The folder is the run: its store, recordings and results. The same tasks in the same folder
    continue a killed run; saved results are not run again (I3). Raises `Invalid`, `Conflict`
    (another task of this id was run there before) and `UsageError`.
    """
    # One name wherever the folder is, so that the next run takes the node's place.
    settings = replace(settings, node=replace(settings.node, name="run"))
    raise_file_limit()
    with folder_lock(folder, instead="choose another --out"):
        saved = await asyncio.to_thread(ResultFolder, folder)
        async with (
            open_engine(settings.engine, slots=settings.node.slots) as engine,
            open_local(settings, folder, engine) as local,
            managed_gc(lambda: local.gateway.idle),
        ):
            submitted = await local.submit(tasks)
            results = [view for view in saved.views.values() if view.session in submitted]
            for view in results:
                on_result(view, len(submitted))
            async for view in local.follow(submitted - saved.views.keys()):
                packed = await local.control.trajectory(view.session) if view.bytes else b""
                await asyncio.to_thread(saved.add, view, packed)
                results.append(view)
                on_result(view, len(submitted))
        await asyncio.to_thread(saved.write_index)
    return results
