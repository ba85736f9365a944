"""Server, gateway and node in one process, without an API: run tasks and return their results.

Server and node use the same calls and code as between machines, without a socket: sessions are
leased with an epoch and committed once (I3). When the node registers again, the sessions of an
earlier process of the same folder are queued again, so a killed run continues with exactly the
sessions that have no result yet.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console

from tugline import log
from tugline.client.streams import Result
from tugline.config import NO_CHANGES
from tugline.errors import Missing, ServerError
from tugline.launch.engine import EngineConnection, open_engine, share_engine
from tugline.launch.folder_lock import folder_lock
from tugline.launch.garbage import managed_gc
from tugline.launch.naming import name_run
from tugline.launch.node import RECORDINGS, open_node
from tugline.launch.processes import NODES, divide, keep_nodes
from tugline.launch.progress import SessionProgress
from tugline.launch.server import open_control_plane, serve_control_plane
from tugline.launch.settings import Settings, load_settings, name_model
from tugline.launch.tokens import load_tokens
from tugline.protocol import Control, ResultQuery, ResultView, RunKind, RunStart, RunView
from tugline.recording import file as recordings
from tugline.recording.folder import file_name
from tugline.recording.trajectories import ResultFolder, unpack
from tugline.rollout.parts import Parts
from tugline.rollout.rejudge import name_user
from tugline.server.control import ControlPlane
from tugline.server.store import nodes, results, runs, sessions
from tugline.server.store.base import Tx
from tugline.server.store.sessions import SessionRow
from tugline.server.store.tasks import pack, raise_samples
from tugline.types import Call, Mode, Task, Trajectory
from tugline.web.serve import raise_file_limit

_STOP_S = 30.0
"""Seconds that sessions may take to end when the run is stopped."""
_FOR_EVER_S = 1e9
_UNLIMITED_GB = 1e9
"""The recordings of a run are kept with it."""
_BATCH = 1000
_WAIT_S = 1.0
"""Seconds without a result after which the node is checked."""

_log = log.get("launch")
OnDone = Callable[[int, int], None]
"""Callback with the number of finished sessions of the batch, and of all its sessions."""


class OnResult(Protocol):
    """Callback with each result; those of an earlier run come first and are not `new`."""

    def __call__(self, view: ResultView, *, new: bool) -> None:
        """Take a result."""


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
            cursor = page.cursor
            for view in page.items:
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


def run(tasks: Task | Sequence[Task], **options: Any) -> list[Result]:
    """Run tasks until all are done; `options` are those of `run_async`.

    In a notebook, and wherever else an event loop runs, the work is done in a thread of its own,
    which the caller waits for; an interrupt stops it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return uvloop.run(run_async(tasks, **options))
    started: Future[Callable[[], object]] = Future()

    async def work() -> list[Result]:
        event_loop = asyncio.get_running_loop()
        this = asyncio.current_task()
        started.set_result(lambda: event_loop.call_soon_threadsafe(this.cancel) if this else None)
        return await run_async(tasks, **options)

    with ThreadPoolExecutor(1, "tugline-run") as thread:
        try:
            running = thread.submit(lambda: uvloop.run(work()))
            return running.result()
        except KeyboardInterrupt:
            started.result()()
            raise


async def run_async(  # noqa: PLR0913 - the options of the command
    tasks: Task | Sequence[Task],
    *,
    engine: str | Sequence[str] | None = None,
    model: str | Path | None = None,
    tokenizer: str | Path | None = None,
    renderer: str | None = None,
    api_key_env: str | None = None,
    messages_only: bool = False,
    slots: int | None = None,
    config: Path | str | None = None,
    changes: Mapping[str, Any] = NO_CHANGES,
    out: Path | str | None = None,
    progress: bool = True,
) -> list[Result]:
    """Run tasks in this process; return the results in order of tasks and samples.

    The arguments are the options of `tugline run`: `engine` has the engine's address or those of
    its replicas, `model` its served name (without `engine`: a model folder to serve here),
    `tokenizer` and `renderer` are for exact mode, `config` is a file with any setting, and
    `changes` replace settings by dotted key. Without `out` the run uses a temporary folder.
    Progress and warnings go to stderr. Raises the errors of `run_in_folder`, and `EngineError`.
    """
    if not structlog.is_configured():
        log.configure()
    tasks = [tasks] if isinstance(tasks, Task) else tasks
    settings = load_settings(
        None if config is None else Path(config),
        server={},
        node={"slots": slots},
        engine={
            "urls": [engine] if isinstance(engine, str) else engine,
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "renderer": renderer,
            "api_key_env": api_key_env,
            "mode": Mode.TEXT.value if messages_only else None,
        },
        changes=changes,
    )
    if model is not None:
        settings = name_model(settings, str(model))
    order = {task.id: number for number, task in enumerate(tasks)}
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not progress)
    shown = SessionProgress(console, sum(task.samples for task in tasks))

    def add(view: ResultView, *, new: bool) -> None:
        failure = view.failure.message if view.failure else ""
        shown.add(view.session, view.reward, failure, new=new)

    with tempfile.TemporaryDirectory(prefix="tugline-") as temporary, shown.bar:
        folder = Path(out or temporary)
        views = await run_in_folder(tasks, settings, folder, add)
        path = ResultFolder(folder).path
        return [
            Result(view, path(view.session).read_bytes() if view.bytes else b"")
            for view in sorted(views, key=lambda view: (order[view.task], view.sample))
        ]


async def run_in_folder(
    tasks: Sequence[Task],
    settings: Settings,
    folder: Path,
    on_result: OnResult,
    *,
    more_samples: bool = False,
    kind: RunKind = RunKind.RUN,
) -> list[ResultView]:
    """Run all samples of `tasks` and save their results in `folder`.

    The folder has the store, recordings and results of the run. The same tasks in the same folder
    continue a killed run; sessions with saved results are not run again (I3),
    except those that failed for a reason outside the policy. With `more_samples`, tasks may have
    more samples than before, of which only the new ones run. Raises `Invalid`,
    `Conflict` (another task with this id was run in the folder) and `UsageError`.
    """
    # The same name in every process, so that the next run replaces the node.
    settings = replace(settings, node=replace(settings.node, name="run"))
    raise_file_limit()
    await asyncio.to_thread(Parts().check_available, tasks)
    with folder_lock(folder, instead="choose another --out"):
        saved = await asyncio.to_thread(ResultFolder, folder)
        async with (
            open_engine(settings.engine, slots=settings.node.slots) as engine,
            open_local(settings, folder, engine) as local,
            managed_gc(local.is_idle),
        ):
            local.run_name = name_run(folder)
            configuration = msgspec.to_builtins(settings, enc_hook=str)
            await local.start_run(local.run_name, kind, configuration, by=name_user())
            if more_samples:
                packed_tasks = await asyncio.to_thread(lambda: [pack(task) for task in tasks])
                await local.control.database.write(raise_samples, packed_tasks)
            submitted = await local.submit(tasks)
            again = await local.run_again([task.id for task in tasks])
            await asyncio.to_thread(saved.forget, again)
            ended = [view for view in saved.views.values() if view.session in submitted]
            for view in ended:
                on_result(view, new=False)
            async for view in local.follow(submitted - saved.views.keys()):
                packed = await local.control.trajectory(view.session) if view.bytes else b""
                await asyncio.to_thread(saved.add, view, packed)
                ended.append(view)
                on_result(view, new=True)
            await local.end_run(local.run_name)
        await asyncio.to_thread(saved.write_index)
    return ended
