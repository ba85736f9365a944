"""A node and its store in one process: lease, roll out, commit, until the tasks are done.

The same protocol as between machines, without a socket: sessions are leased with an epoch, renewed
while they run and committed once (I3). What an earlier process of the same run left behind is
reclaimed at the start, and its orphaned programs are ended, so a run that was killed goes on with
exactly the sessions that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tugline import log
from tugline.errors import FencedError
from tugline.node.parts import Parts
from tugline.node.session import Gateway, roll_out
from tugline.server.store import Store
from tugline.types import TERMINAL, Boundary, Part, Session, Status, Task, Trajectory

LEASE_S = 60.0
STOP_S = 30.0
"""How long sessions may take to end when the run is stopped."""
OWNER = "local"
_log = log.get("cluster")

OnDone = Callable[[int, int], None]
"""Told how many sessions of the batch are done, and of how many."""


class Local:
    """Runs up to `slots` sessions at a time in folders under `directory`."""

    def __init__(
        self, store: Store, gateway: Gateway, parts: Parts, directory: Path, *, slots: int
    ) -> None:
        self._store, self._gateway, self._parts = store, gateway, parts
        self._directory, self._slots = directory, slots

    def recover(self) -> int:
        """End and take back what a killed process of this run had; returns how many sessions."""
        self._parts.runtime(Part("local")).reap(self._directory)
        return len(self._store.reclaim(OWNER))

    async def run(
        self, tasks: Sequence[Task], on_done: OnDone = lambda _done, _total: None
    ) -> list[Trajectory]:
        """Results of all samples of `tasks`; those that have one already are not run again."""
        for task in tasks:
            self._parts.check(task)
        known = {task.id: task for task in tasks}
        total = sum(len(self._store.submit(task)) for task in tasks)
        done = len(self._store.results(known))
        on_done(done, total)
        running: set[asyncio.Task[bool]] = set()
        async with self._renewing():
            try:
                while True:
                    room = self._slots - len(running)
                    for session in self._store.lease(room, OWNER, LEASE_S) if room else []:
                        task = known.get(session.task) or self._store.task(session.task)
                        running.add(asyncio.create_task(self._one(task, session)))
                    if not running:
                        break
                    ended, running = await asyncio.wait(
                        running, return_when=asyncio.FIRST_COMPLETED
                    )
                    done += sum(one.result() for one in ended)
                    on_done(done, total)
            finally:
                await _end(running)
        return self._store.results(known)

    async def _one(self, task: Task, session: Session) -> bool:
        """One session from its lease to its result; False if it must be run again."""

        def on_stage(status: Status) -> None:
            if status is not Status.INIT:  # that is what leasing it made it
                self._store.advance(session.id, session.epoch, status)

        # A path of constant length: agents tell the model where they are.
        directory = self._directory / f"{session.id}.{session.epoch}"
        try:
            trajectory = await roll_out(
                task,
                session,
                gateway=self._gateway,
                directory=directory,
                parts=self._parts,
                on_stage=on_stage,
            )
            if trajectory.failure and trajectory.failure.boundary is Boundary.INFRASTRUCTURE:
                why = trajectory.failure.message
                return self._store.release(session.id, session.epoch, why).status in TERMINAL
            self._store.commit(session.id, session.epoch, trajectory)
        except FencedError as error:
            _log.warning("lease lost", session=session.id, error=str(error))
            return False
        return True

    @contextlib.asynccontextmanager
    async def _renewing(self) -> AsyncIterator[None]:
        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_S / 3)
                self._store.renew(OWNER, LEASE_S)

        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            await _end({task})


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_S)
