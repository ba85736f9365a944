"""A batch of tasks from first to last in this process, with every result as a file when it ends.

The folder is the run: its store, recordings and results. The same tasks in the same folder go on
where a killed run was; what is saved is not run again (I3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from tugline.launch.engine import engine
from tugline.launch.folder import only_one
from tugline.launch.local import local
from tugline.launch.settings import Settings
from tugline.launch.stopping import stopping
from tugline.protocol import ResultView
from tugline.recording.trajectories import ResultFolder
from tugline.types import Task
from tugline.web.serve import freeze_gc

OnResult = Callable[[ResultView, int], None]
"""Told each result, those of an earlier run first, and of how many."""


async def run(
    tasks: Sequence[Task], told: Settings, folder: Path, on_result: OnResult
) -> list[ResultView]:
    """The results of all samples of `tasks`, which are files in `folder` by then.

    Raises `Invalid`, `Conflict` (another task of this id was run there before) and `UsageError`.
    """
    me = asyncio.current_task()
    with (
        only_one(folder, instead="choose another --out"),
        stopping(lambda: None if me is None else me.cancel()),
    ):
        saved = await asyncio.to_thread(ResultFolder, folder)
        async with (
            engine(told.engine, slots=told.node.slots) as reached,
            local(_named(told), folder, reached) as up,
        ):
            freeze_gc()
            wanted = await up.submit(tasks)
            results = [view for view in saved.views.values() if view.session in wanted]
            for view in results:
                on_result(view, len(wanted))
            async for view in up.follow(wanted - saved.views.keys()):
                packed = await up.control.trajectory(view.session) if view.bytes else b""
                await asyncio.to_thread(saved.add, view, packed)
                results.append(view)
                on_result(view, len(wanted))
        await asyncio.to_thread(saved.write_index)
    return results


def _named(told: Settings) -> Settings:
    """With a name that is the same wherever the folder is, so that the next run takes over."""
    return replace(told, node=replace(told.node, name="run"))
