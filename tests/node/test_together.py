from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pretend_node import Bench, Given, task
from tugline.errors import ServerError
from tugline.node.app import Node
from tugline.protocol import Dispatcher, Pause, PauseMode
from tugline.server.blobs import open_blobs
from tugline.server.control import ControlPlane
from tugline.server.store import nodes, results
from tugline.server.store.database import open_database
from tugline.types import Group, Status


@contextlib.asynccontextmanager
async def plane(folder: Path, lease_s: float = 1.0) -> AsyncIterator[ControlPlane]:
    """A real control plane on SQLite."""
    database = open_database(f"sqlite:{folder / 'server.db'}")
    async with ControlPlane(
        database, open_blobs(str(folder / "blobs")), folder=folder, lease_s=lease_s
    ) as control:
        yield control


class Away:
    """A dispatcher that can be out of reach."""

    def __init__(self, control: ControlPlane) -> None:
        self.dispatcher: Dispatcher | None = control.dispatcher

    def __getattr__(self, name: str) -> Any:
        async def ask(*args: Any) -> Any:
            if self.dispatcher is None:
                msg = "connection refused"
                raise ServerError(msg)
            return await getattr(self.dispatcher, name)(*args)

        return ask


class Pair:
    """A node at work on a real control plane."""

    def __init__(self, folder: Path, control: ControlPlane, **settings: float) -> None:
        self.bench = Bench(folder, **settings)
        self.control, self.folder = control, folder
        self.gateway, self.script = self.bench.gateway, self.bench.script
        self.node = self.another()

    def another(self) -> Node:
        """A node in the same folder, as after a restart."""
        parts = Given(self.script)
        dispatcher = self.control.dispatcher
        return Node(dispatcher, self.gateway, parts, self.folder, self.bench.settings)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[asyncio.Task[None]]:
        """It runs while the block lasts."""
        running = asyncio.create_task(self.node.run())
        try:
            yield running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def until(true: Callable[[], Awaitable[object]], within_s: float = 15.0) -> None:
    """Wait for something, not for ever."""
    async with asyncio.timeout(within_s):
        while not await true():  # noqa: ASYNC110 - anything may make it true
            await asyncio.sleep(0.02)


async def ended(control: ControlPlane) -> dict[str, Status]:
    """Status of every session with a result."""
    return {one.session: one.status for one in (await control.results(limit=1000)).items}


async def test_enough_of_a_group_ends_the_rest(tmp_path: Path) -> None:
    """Stragglers are told at once, and what they sampled is committed with their ledger."""
    async with plane(tmp_path) as control:
        pair = Pair(tmp_path, control, slots=4)
        async with pair.working():
            group = msgspec.structs.replace(task(samples=4), group=Group(min_usable=2))
            pair.script.hang = frozenset({"t-2", "t-3"})
            await control.submit([group])

            async def over() -> bool:
                return len(await ended(control)) == 4

            await until(over)
        found = await ended(control)
        assert found["t-0"] is found["t-1"] is Status.COMPLETED
        assert found["t-2"] is found["t-3"] is Status.CANCELLED
        assert (await control.database.read(results.get, "t-2")).trained == 2


async def test_a_barrier_holds_on_every_node(tmp_path: Path) -> None:
    """It is there at once, and names a node that has not paused."""
    async with plane(tmp_path) as control:
        pair = Pair(tmp_path, control)
        async with pair.working():
            await until(lambda: control.database.read(nodes.list_views))
            paused = await control.weights.pause(Pause(mode=PauseMode.ABORT, within_s=5))
            assert (paused.applied, paused.missing) == (("n",), ())
            await control.weights.announce(3)
            after = await control.weights.resume()
            assert (after.applied, after.version, after.paused) == (("n",), 3, None)
        assert pair.gateway.did == [("pause", "abort"), 3, ("pause", "abort"), "resume"]


@pytest.mark.parametrize("gently", [True, False])
async def test_what_a_node_leaves_is_done_by_the_next(tmp_path: Path, gently: bool) -> None:  # noqa: FBT001
    """Drained or dead: every sample is rolled out to its end, once."""
    async with plane(tmp_path) as control:
        first = Pair(tmp_path, control, slots=2, run=0.1, grace_s=0.0 if gently else 60.0)
        async with first.working() as running:
            await control.submit([task(samples=12)])

            async def some() -> bool:
                return 2 <= len(await ended(control)) < 8

            await until(some)
            if gently:
                await control.dispatcher.drain(first.node.id)
                await asyncio.wait_for(asyncio.shield(running), 10)
        second = Pair(tmp_path, control, slots=2)
        async with second.working():

            async def over() -> bool:
                return len(await ended(control)) == 12

            await until(over)
        assert set((await ended(control)).values()) == {Status.COMPLETED}


async def test_a_hundred_sessions_and_a_server_that_restarts(tmp_path: Path) -> None:
    """The node works on while there is no server, and joins nobody twice."""
    async with plane(tmp_path) as control:
        pair = Pair(tmp_path, control, slots=8, run=0.05)
        away = Away(control)
        pair.node = Node(
            away, pair.gateway, Given(pair.script), tmp_path / "n", pair.bench.settings
        )
        async with pair.working():
            await control.submit([task(f"t{n}", samples=4) for n in range(25)])

            async def some() -> bool:
                return len(await ended(control)) > 20

            await until(some)
            away.dispatcher = None
            await asyncio.sleep(0.3)
            away.dispatcher = control.dispatcher

            async def over() -> bool:
                return len(await ended(control)) == 100

            await until(over)
        assert set((await ended(control)).values()) == {Status.COMPLETED}
        assert (pair.node.stats.fenced, pair.node.stats.rejoined) == (0, 0)
        assert len(pair.script.order) == 100
