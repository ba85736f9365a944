"""Server, gateway and node in one process, without an API: run these tasks, give me the results.

The same calls as between machines go through the same code, without a socket: sessions are leased
with an epoch and committed once (I3). What an earlier process of the same folder left behind is
taken back when the node registers again, so a run that was killed goes on with exactly the
sessions that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tugline.errors import Missing, ServerError
from tugline.gateway.app import Gateway
from tugline.launch.engine import EngineConnection
from tugline.launch.node import worker
from tugline.launch.server import control_plane
from tugline.launch.settings import Settings
from tugline.protocol import ResultView, SessionView
from tugline.recording.trajectories import unpack
from tugline.server.control import ControlPlane
from tugline.server.store import sessions
from tugline.types import TERMINAL, Session, Task, Trajectory

STOP_S = 30.0
"""How long sessions may take to end when the run is stopped."""
_BATCH = 1000
_WAIT_S = 30.0

T = TypeVar("T")
OnDone = Callable[[int, int], None]
"""Told how many sessions of the batch are done, and of how many."""


class Local:
    """What `local` yields; may be used for one batch of tasks after the other."""

    def __init__(
        self, control: ControlPlane, gateway: Gateway, working: asyncio.Task[None]
    ) -> None:
        self.control, self.gateway = control, gateway
        self._working = working

    async def run(
        self, tasks: Sequence[Task], on_done: OnDone = lambda _done, _total: None
    ) -> list[Trajectory]:
        """Results of all samples of `tasks`; those that have one already are not run again."""
        wanted = await self.submit(tasks)
        done = 0
        on_done(done, len(wanted))
        async for _ in self.follow(wanted):
            done += 1
            on_done(done, len(wanted))
        return await self.results([task.id for task in tasks])

    async def submit(self, tasks: Sequence[Task]) -> frozenset[str]:
        """Keep `tasks`; returns their sessions. Raises `Invalid` and `Conflict`."""
        sessions: set[str] = set()
        for start in range(0, len(tasks), _BATCH):
            for accepted in await self.control.submit(tasks[start : start + _BATCH]):
                sessions.update(accepted.sessions)
        return frozenset(sessions)

    async def follow(self, sessions: Collection[str]) -> AsyncIterator[ResultView]:
        """The result of each of `sessions`, as they come; those that are there already first."""
        cursor, missing = 0, set(sessions)
        while missing:
            page = await self._unless_it_ends(
                self.control.results(after=cursor, limit=_BATCH, wait_s=_WAIT_S)
            )
            cursor = page.cursor
            for view in page.items:
                if view.session in missing:
                    missing.remove(view.session)
                    yield view

    async def results(self, tasks: Sequence[str]) -> list[Trajectory]:
        """What there is of these tasks, in their order and that of their samples."""
        packed = []
        for session in await self.sessions(tasks):
            if session.status in TERMINAL:
                with contextlib.suppress(Missing):  # it was cancelled before it ran
                    packed.append(await self.control.trajectory(session.id))
        return await asyncio.to_thread(lambda: [unpack(one) for one in packed])

    async def sessions(self, tasks: Sequence[str]) -> list[SessionView]:
        """The sessions of these tasks, in their order and that of their samples."""
        found: list[SessionView] = []
        for task in tasks:
            after, rest = None, True
            while rest:
                page = await self.control.database.read(
                    sessions.page, task=task, after=after, limit=_BATCH
                )
                found += page.sessions
                after, rest = page.next, page.next is not None
        return found

    async def recordings(self, tasks: Sequence[str]) -> dict[str, Path]:
        """By session, where the calls of its last attempt are, if it made any."""
        paths = {
            one.id: self.gateway.recording_path(
                Session(id=one.id, task=one.task, sample=one.sample, epoch=one.epoch)
            )
            for one in await self.sessions(tasks)
        }
        return {session: path for session, path in paths.items() if path.exists()}

    async def _unless_it_ends(self, asked: Coroutine[Any, Any, T]) -> T:
        """An answer, unless the node stops first: then nobody would ever give it."""
        answer = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({answer, self._working}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                error = None if self._working.cancelled() else self._working.exception()
                msg = "the node has stopped; what is missing can be run again"
                raise ServerError(msg) from error
            return answer.result()
        finally:
            answer.cancel()


@contextlib.asynccontextmanager
async def local(told: Settings, folder: Path, reached: EngineConnection) -> AsyncIterator[Local]:
    """Everything up, in `folder`, in front of an engine."""
    async with (
        control_plane(told.server, folder) as control,
        worker(told, folder, control.dispatcher, reached, keep=True) as one,
    ):
        working = asyncio.create_task(one.node.run(), name="node")
        try:
            yield Local(control, one.gateway, working)
        finally:
            working.cancel()
            await asyncio.wait({working}, timeout=STOP_S)
