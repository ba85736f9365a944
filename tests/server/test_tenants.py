"""Tenants: fair shares of the queue, and limits, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from support.control_plane import IdleNode, Open, finish, on_postgres, record_statements, submit
from support.tasks import make_task
from tugline.config import from_mapping
from tugline.errors import ConfigError, QuotaExceeded
from tugline.protocol import NodeRegistration
from tugline.server.settings import DEFAULTS, ServerSettings, TenantSettings
from tugline.server.store import leases, nodes, stats, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.types import Task

NOW = 1_000_000.0


def _settings(**tenants: Any) -> ServerSettings:
    """Server settings with these limits, or weights, of tenants."""
    return from_mapping({"tenants": tenants}, ServerSettings)


async def _submit(database: Database, *batch: Task, at: float = NOW) -> None:
    database.clock = lambda: at
    await database.write(submit, *batch)


async def _lease(database: Database, n: int, settings: ServerSettings = DEFAULTS) -> list[str]:
    """Tasks of the next `n` sessions that a node is granted."""

    def op(tx: Tx) -> list[str]:
        if not nodes.list_open(tx):
            node = NodeRegistration(name="n", slots=1, capacity=1)
            nodes.add(tx, "n", node, "token", lease_s=1e6)
        granted = leases.grant(tx, {"n": n}, settings)
        return [session.task for session in granted.get("n", [])]

    return await database.write(op)


async def _count(database: Database, n: int, settings: ServerSettings = DEFAULTS) -> Counter[str]:
    """How many of the next `n` sessions are of each task."""
    return Counter(await _lease(database, n, settings))


# --------------------------------------------------------------------------- shares
@pytest.mark.parametrize("at_once", [1, 7, 40])
async def test_tenants_share_by_their_weights(database: Database, at_once: int) -> None:
    """Shares are 3 to 1 at every moment, within one session, in leases of any size."""
    settings = _settings(big=3.0, idle=100.0)
    await _submit(database, make_task("b", 60, tenant="big"), make_task("s", 60, tenant="small"))
    got = Counter[str]()
    while sum(got.values()) + at_once <= 60:
        leased = await _lease(database, at_once, settings)
        assert len(leased) == at_once, "nothing is kept free for those who want nothing"
        got.update(leased)
        assert abs(got["b"] - 3 * sum(got.values()) / 4) <= 1


async def test_idle_tenants_earn_no_credit(database: Database) -> None:
    """A tenant earns no credit before its first task, nor during a pause."""
    await _submit(database, make_task("a", 50, tenant="a"))
    assert await _count(database, 40) == {"a": 40}
    await _submit(database, make_task("b", 50, tenant="b"))
    assert await _count(database, 10) == {"a": 5, "b": 5}
    assert await _count(database, 60) == {"a": 5, "b": 45}, "both have what there is"
    await _submit(database, make_task("c", 50, tenant="c"))
    await _submit(database, make_task("d", 50, tenant="a"))
    assert await _count(database, 20) == {"c": 10, "d": 10}


async def test_higher_priority_goes_first(database: Database) -> None:
    """Priority decides among tasks of about the same age; else the older one goes first."""
    await _submit(database, make_task("low", 2, priority=-1), make_task("normal", 2))
    await _submit(database, make_task("high", 2, priority=1), at=NOW + 30)
    assert await _lease(database, 6) == ["high"] * 2 + ["normal"] * 2 + ["low"] * 2


async def test_low_priority_is_not_starved(database: Database) -> None:
    """Under an endless stream of the highest priority the lowest waits 20 minutes."""
    await _submit(database, make_task("low", 1, priority=-10))
    for minute in itertools.count():
        await _submit(database, make_task(f"high{minute}", 3, priority=10), at=NOW + 60 * minute)
        if "low" in await _lease(database, 3):
            break
        assert minute < 25
    assert minute >= 19


async def test_a_huge_task_does_not_block_its_tenant(database: Database) -> None:
    """A small task that comes a little later is served in between."""
    await _submit(database, make_task("huge", 1000))
    await _submit(database, make_task("small", 4), at=NOW + 90)
    assert (await _count(database, 200))["small"] == 4


async def test_requeued_sessions_keep_their_place(database: Database) -> None:
    """An infrastructure failure does not move a session to the end of the queue."""
    await _submit(database, make_task("first"), make_task("second", 3))
    assert await _lease(database, 1) == ["first"]
    await database.write(leases.expire_node, "n", "gone")
    await database.write(lambda tx: tx.run("DELETE FROM nodes"))
    assert await _lease(database, 2) == ["first", "second"]


# --------------------------------------------------------------------------- limits of sessions
async def test_a_tenant_at_its_limit_leaves_slots_to_others(database: Database) -> None:
    """A lowered limit holds, too, and each ended session makes room for another."""
    await _submit(database, make_task("a", 9, tenant="a"), make_task("b", 20, tenant="b"))
    three = _settings(a={"sessions": 3})
    assert await _count(database, 2, three) == {"a": 1, "b": 1}
    assert await _count(database, 8, three) == {"a": 2, "b": 6}
    assert await _count(database, 2, _settings(a={"sessions": 1})) == {"b": 2}
    await database.write(finish, "a-0")
    assert await _count(database, 4, three) == {"a": 1, "b": 3}
    assert await _count(database, 99, _settings(a={"sessions": 99})) == {"a": 5, "b": 8}


async def test_waiting_at_a_limit_earns_no_credit(database: Database) -> None:
    """Once the limit is gone, both tenants have equal shares again."""
    await _submit(database, make_task("a", 90, tenant="a"), make_task("b", 90, tenant="b"))
    for _ in range(20):
        await _lease(database, 2, _settings(a={"sessions": 2}))
    got = await _count(database, 20)
    assert abs(got["a"] - got["b"]) <= 2


async def test_default_applies_to_each_tenant_without_an_entry(database: Database) -> None:
    """Each such tenant has the default limits and weight; an entry is not merged with them."""
    names = ("a", "b", "default", "own")
    await _submit(database, *(make_task(name, 40, tenant=name) for name in names))
    limited = _settings(default={"sessions": 2}, own={"weight": 2.0})
    assert await _count(database, 20, limited) == {"a": 2, "b": 2, "default": 2, "own": 14}
    shared = await _count(database, 24, _settings(default=2.0, own=6.0))
    assert shared == {"a": 4, "b": 4, "default": 4, "own": 12}


async def test_counting_needs_limits(database: Database) -> None:
    """Leases and submissions run no COUNT query without limits, and few with them."""

    def op(tx: Tx, settings: ServerSettings, name: str) -> int:
        with record_statements(tx) as seen:
            tasks.submit(tx, [tasks.pack(make_task(name, 3))], settings)
            leases.grant(tx, {"n": 1}, settings)
        return sum("COUNT" in sql for sql in seen)

    await _lease(database, 0)
    limits = {"sessions": 9, "queued": 9}
    assert await database.write(op, _settings(default=2.0), "a") == 0
    assert await database.write(op, _settings(other=limits), "b") == 0
    assert await database.write(op, _settings(default=limits), "c") == 3


async def test_an_ended_session_makes_room_on_another_node(open_control: Open) -> None:
    """A waiting node with free slots gets the next session at once."""
    async with open_control(tenants={"default": TenantSettings(sessions=1)}) as control:
        one = await IdleNode.at_work(control, make_task("t", 2), name="one")
        assert list(one.held) == ["t-0"]
        two = await IdleNode.join(control, "two")
        waiting = await two.start_asking()
        await one.commit("t-0")
        assert [work.session.id for work in (await waiting).work] == ["t-1"]


@on_postgres
async def test_servers_of_one_store_share_a_limit(open_control: Open) -> None:
    """Concurrent grants never exceed the limit; a session that ends on one is room on the other."""
    limits = {"t": TenantSettings(sessions=5)}
    async with AsyncExitStack() as stack:
        made = [open_control(tenants=limits) for _ in range(2)]
        servers = [await stack.enter_async_context(server) for server in made]
        idlers = [
            await IdleNode.join(server, f"{n}", room=2) for n, server in enumerate(servers * 3)
        ]
        await servers[0].submit([make_task("t", 30, tenant="t")])
        ended = 0
        while ended < 30:
            await asyncio.gather(*(each.ask(wait_s=0.05) for each in idlers))
            held = [(each, session) for each in idlers for session in each.held]
            assert len(held) <= 5
            for each, session in held[:3]:
                await each.commit(session)
                ended += 1
        assert (await servers[1].database.read(stats.counts)).sessions == {"completed": 30}


# --------------------------------------------------------------------------- queued
async def test_unfinished_sessions_of_a_tenant_are_bounded(open_control: Open) -> None:
    """Beyond the limit the whole request is refused; known tasks may be sent again."""
    async with open_control(tenants={"lab": TenantSettings(queued=5)}) as control:
        first, other = make_task("a", 4, tenant="lab"), make_task("other", 9)
        await control.submit([first])
        batch = [first, other, make_task("b", 1, tenant="lab"), make_task("c", tenant="lab")]
        with pytest.raises(QuotaExceeded) as caught:
            await control.submit(batch)
        assert (caught.value.field, caught.value.status, caught.value.retry_s) == ("tenant", 429, 0)
        assert str(caught.value) == (
            "tenant is 'lab', which has 4 of at most 5 unfinished sessions;"
            " 2 more exceed it: submit 1 now, and the others as sessions end"
        )
        assert [one.new for one in await control.submit([first, other])] == [False, True]
        node = await IdleNode.join(control)
        await node.ask()
        with pytest.raises(QuotaExceeded):  # a running session is not final
            await control.submit(batch)
        await node.commit("a-0")
        assert [one.new for one in await control.submit(batch)] == [False, False, True, True]


# --------------------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ({"a": 0}, "tenants.a is 0, must be"),
        ({"a": {"session": 1}}, "unknown key 'tenants.a.session'; did you mean 'sessions'?"),
        ({"a": {"sessions": 0}}, "tenants.a.sessions is 0, must be an integer"),
        ({"a": {"queued": 1.5}}, "tenants.a.queued is 1.5, must be an integer or null"),
        ({"a": {"requests_per_minute": -1}}, "tenants.a.requests_per_minute is -1, must be"),
        ({"a b": 1}, "tenants is {'a b': 1}, each key must be a string matching"),
    ],
)
def test_invalid_limits_are_reported(tenants: Any, message: str) -> None:
    """The message has key, value, and what would be right."""
    with pytest.raises(ConfigError) as caught:
        ServerSettings(tenants=tenants)
    assert message in str(caught.value)
