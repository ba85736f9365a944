"""Run tasks in this process until all are done, for `tugline.run` and commands."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import msgspec
import structlog
import uvloop
from msgspec.structs import replace
from rich.console import Console

from tugline import log
from tugline.client.streams import Result
from tugline.config import NO_CHANGES
from tugline.launch.engine import open_engine
from tugline.launch.folder_lock import folder_lock
from tugline.launch.garbage import managed_gc
from tugline.launch.local import open_local
from tugline.launch.naming import name_run
from tugline.launch.prices import measure_cost
from tugline.launch.progress import SessionProgress
from tugline.launch.settings import Settings, load_settings, name_model
from tugline.protocol import ResultView, RunKind
from tugline.recording.trajectories import ResultFolder
from tugline.rollout.parts import Parts
from tugline.rollout.rejudge import name_user
from tugline.server.store.tasks import pack, raise_samples
from tugline.types import Mode, Task
from tugline.web.serve import raise_file_limit


class OnResult(Protocol):
    """Callback with each result; those of an earlier run come first and are not `new`."""

    def __call__(self, view: ResultView, *, new: bool) -> None:
        """Take a result."""


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
    ended = Event()

    async def work() -> list[Result]:
        event_loop = asyncio.get_running_loop()
        this = asyncio.current_task()
        started.set_result(lambda: event_loop.call_soon_threadsafe(this.cancel) if this else None)
        return await run_async(tasks, **options)

    def run_to_end() -> list[Result]:
        try:
            return uvloop.run(work())
        finally:
            ended.set()

    with ThreadPoolExecutor(1, "tugline-run") as thread:
        try:
            return thread.submit(run_to_end).result()
        except KeyboardInterrupt:
            started.result()()
            ended.wait()  # the executor does not if the interrupt came while its thread started
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
            cost = measure_cost(ended, settings.prices)
            if cost is not None:
                await local.report_step(local.run_name, 0, cost.figures)
            await local.end_run(local.run_name)
        await asyncio.to_thread(saved.write_index)
    return ended
