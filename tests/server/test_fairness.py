from __future__ import annotations

import itertools
from collections import Counter

import pytest

from leased import a_task
from tugline.protocol import NodeRegistration
from tugline.server.settings import DEFAULTS, ServerSettings
from tugline.server.store import leases, nodes, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.types import Task

NOW = 1_000_000.0


async def _submit(database: Database, *batch: Task, at: float = NOW) -> None:
    database.clock = lambda: at
    await database.write(tasks.submit, [tasks.pack(task) for task in batch])


async def _lease(database: Database, n: int, settings: ServerSettings = DEFAULTS) -> list[str]:
    """Tasks of the next `n` sessions, as one node gets them."""

    def op(tx: Tx) -> list[str]:
        if not nodes.list_open(tx):
            node = NodeRegistration(name="n", slots=1, capacity=1)
            nodes.add(tx, "n", node, "token", lease_s=1e6)
        granted = leases.grant(tx, {"n": n}, settings)
        return [session.task for session in granted.get("n", [])]

    return await database.write(op)


@pytest.mark.parametrize("at_once", [1, 7, 40])
async def test_tenants_share_by_their_weights(database: Database, at_once: int) -> None:
    """3 to 1 at every moment, within one, however many are leased at a time."""
    settings = ServerSettings(tenants={"big": 3.0})
    await _submit(database, a_task("b", 60, tenant="big"), a_task("s", 60, tenant="small"))
    got = Counter[str]()
    while sum(got.values()) + at_once <= 60:
        got.update(await _lease(database, at_once, settings))
        assert abs(got["b"] - 3 * sum(got.values()) / 4) <= 1


async def test_who_comes_back_starts_level(database: Database) -> None:
    """Time without work earns nothing: neither at the first visit nor at a later one."""
    await _submit(database, a_task("a", 50, tenant="a"))
    assert await _lease(database, 40) == ["a"] * 40
    await _submit(database, a_task("b", 50, tenant="b"))
    assert Counter(await _lease(database, 10)) == {"a": 5, "b": 5}
    assert Counter(await _lease(database, 60)) == {"a": 5, "b": 45}, "both have what there is"
    await _submit(database, a_task("c", 50, tenant="c"))
    await _submit(database, a_task("d", 50, tenant="a"))
    assert Counter(await _lease(database, 20)) == {"c": 10, "d": 10}


async def test_a_tenant_alone_has_everything(database: Database) -> None:
    """Shares are of what is wanted: nothing is kept free for those who want nothing."""
    settings = ServerSettings(tenants={"idle": 100.0})
    await _submit(database, a_task("t", 30, tenant="alone"))
    assert len(await _lease(database, 30, settings)) == 30


async def test_priority_goes_first(database: Database) -> None:
    """Among tasks of about the same time the higher one is served first, then the older one."""
    await _submit(database, a_task("low", 2, priority=-1), a_task("normal", 2))
    await _submit(database, a_task("high", 2, priority=1), at=NOW + 30)
    assert await _lease(database, 6) == ["high"] * 2 + ["normal"] * 2 + ["low"] * 2


async def test_priority_does_not_starve(database: Database) -> None:
    """Under an endless stream of the highest priority the lowest waits 20 minutes, not for ever."""
    await _submit(database, a_task("low", 1, priority=-10))
    for minute in itertools.count():
        await _submit(database, a_task(f"high{minute}", 3, priority=10), at=NOW + 60 * minute)
        if "low" in await _lease(database, 3):
            break
        assert minute < 25
    assert minute >= 19


async def test_a_huge_task_does_not_block_its_tenant(database: Database) -> None:
    """A small one that comes a little later gets in between."""
    await _submit(database, a_task("huge", 1000))
    await _submit(database, a_task("small", 4), at=NOW + 90)
    first = await _lease(database, 200)
    assert first.count("small") == 4


async def test_requeued_sessions_keep_their_place(database: Database) -> None:
    """What failed for no fault of its own does not stand in line again from the end."""
    await _submit(database, a_task("first"), a_task("second", 3))
    assert await _lease(database, 1) == ["first"]
    await database.write(leases.expire_node, "n", "gone")
    await database.write(lambda tx: tx.run("DELETE FROM nodes"))
    assert await _lease(database, 2) == ["first", "second"]
