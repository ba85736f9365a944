"""Limits of tenants, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from leased import Idler, Open, a_task
from tugline.errors import ConfigError, QuotaExceeded
from tugline.protocol import NodeRegistration
from tugline.server.blobs import LocalBlobs
from tugline.server.control import ControlPlane
from tugline.server.settings import DEFAULTS, ServerSettings, TenantSettings
from tugline.server.store import leases, nodes, stats, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database, open_database
from tugline.types import Task


def _settings(**tenants: Any) -> ServerSettings:
    """A server on which these tenants have these limits, or weights."""
    made = {
        name: TenantSettings(**one) if isinstance(one, dict) else one
        for name, one in tenants.items()
    }
    return ServerSettings(tenants=made)


async def _submit(database: Database, *batch: Task) -> None:
    await database.write(tasks.submit, [tasks.pack(task) for task in batch])


async def _lease(database: Database, n: int, settings: ServerSettings) -> Counter[str]:
    """How many of the next `n` sessions are of each task, as one node gets them."""

    def op(tx: Tx) -> list[str]:
        if not nodes.list_open(tx):
            node = NodeRegistration(name="n", slots=1, capacity=1)
            nodes.add(tx, "n", node, "token", lease_s=1e6)
        granted = leases.grant(tx, {"n": n}, settings)
        return [session.task for session in granted.get("n", [])]

    return Counter(await database.write(op))


async def _end(database: Database, session: str) -> None:
    """A leased session ends."""

    def op(tx: Tx) -> None:
        tx.run("UPDATE sessions SET stop = 'cancelled', stop_at = 0 WHERE id = :id", id=session)
        leases.end_unstopped(tx, 1.0)

    await database.write(op)


# --------------------------------------------------------------------------- sessions
async def test_a_tenant_at_its_limit_waits_while_others_take_the_slots(database: Database) -> None:
    """Also where its limit was lowered meanwhile; what ends makes room for as many."""
    await _submit(database, a_task("a", 9, tenant="a"), a_task("b", 20, tenant="b"))
    three = _settings(a={"sessions": 3})
    assert await _lease(database, 2, three) == {"a": 1, "b": 1}
    assert await _lease(database, 8, three) == {"a": 2, "b": 6}
    assert await _lease(database, 2, _settings(a={"sessions": 1})) == {"b": 2}
    await _end(database, "a-0")
    assert await _lease(database, 4, three) == {"a": 1, "b": 3}
    assert await _lease(database, 99, _settings(a={"sessions": 99})) == {"a": 5, "b": 8}


async def test_waiting_at_a_limit_earns_nothing(database: Database) -> None:
    """Once the limit is gone, both have the same share again."""
    await _submit(database, a_task("a", 90, tenant="a"), a_task("b", 90, tenant="b"))
    for _ in range(20):
        await _lease(database, 2, _settings(a={"sessions": 2}))
    got = await _lease(database, 20, DEFAULTS)
    assert abs(got["a"] - got["b"]) <= 2


async def test_default_is_for_each_tenant_without_an_entry(database: Database) -> None:
    """Limits and weight, of each by itself; an entry is not mixed with it."""
    names = ("a", "b", "default", "own")
    await _submit(database, *(a_task(name, 40, tenant=name) for name in names))
    limited = _settings(default={"sessions": 2}, own={"weight": 2.0})
    assert await _lease(database, 20, limited) == {"a": 2, "b": 2, "default": 2, "own": 14}
    assert await _lease(database, 24, _settings(default=2.0, own=6.0)) == {
        **dict.fromkeys(names[:3], 4),
        "own": 12,
    }


async def test_without_limits_nothing_is_counted(database: Database) -> None:
    """A lease and a submission have the statements that they had; limits add few."""

    def op(tx: Tx, settings: ServerSettings, name: str) -> list[str]:
        seen, execute = [], tx.execute
        tx.execute = lambda sql, values: seen.append(sql) or execute(sql, values)  # type: ignore[method-assign]
        try:
            tasks.submit(tx, [tasks.pack(a_task(name, 3))], settings)
            leases.grant(tx, {"n": 1}, settings)
        finally:
            tx.execute = execute  # type: ignore[method-assign]
        return [sql for sql in seen if "COUNT" in sql]

    await _lease(database, 0, DEFAULTS)
    assert await database.write(op, _settings(default=2.0), "a") == []
    limits = {"sessions": 9, "queued": 9}
    assert await database.write(op, _settings(other=limits), "b") == []
    assert len(await database.write(op, _settings(default=limits), "c")) == 3


async def test_a_session_that_ends_makes_room_on_another_node(open_control: Open) -> None:
    """A node that waits with free slots gets the next one at once."""
    limits = {"default": TenantSettings(sessions=1)}
    async with open_control(tenants=limits) as control:
        one, two = await Idler.join(control, "one"), await Idler.join(control, "two")
        await control.submit([a_task("t", 2)])
        assert len((await one.ask()).work) == 1
        waiting = await two.start_asking()
        await one.commit("t-0")
        assert [work.session.id for work in (await waiting).work] == ["t-1"]


async def test_servers_of_one_store_hold_a_limit_together(
    postgres_url: str, tmp_path: Path
) -> None:
    """Both give out work at once: never more than the limit; an end on one is room on the other."""
    settings = _settings(t={"sessions": 5})
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                ControlPlane(
                    open_database(postgres_url),
                    LocalBlobs(tmp_path / "blobs"),
                    folder=tmp_path / name,
                    settings=settings,
                )
            )
            for name in ("x", "y")
        ]
        idlers = [await Idler.join(server, f"{n}", room=2) for n, server in enumerate(servers * 3)]
        await servers[0].submit([a_task("t", 30, tenant="t")])
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
async def test_a_tenant_has_so_many_unfinished_sessions(open_control: Open) -> None:
    """More are refused, with all of their request; what is there already may be sent again."""
    limits = {"lab": TenantSettings(queued=5)}
    async with open_control(tenants=limits) as control:
        first = a_task("a", 4, tenant="lab")
        await control.submit([first])
        batch = [first, a_task("other", 9), a_task("b", 1, tenant="lab"), a_task("c", tenant="lab")]
        with pytest.raises(QuotaExceeded) as caught:
            await control.submit(batch)
        assert (caught.value.field, caught.value.status, caught.value.retry_s) == (
            "tenant", 429, 0,
        )  # fmt: skip
        assert str(caught.value) == (
            "tenant is 'lab', which may have 5 unfinished sessions and has 4;"
            " 2 more are too many: submit 1, and others as those end"
        )
        assert [one.new for one in await control.submit([first, batch[1]])] == [False, True]
        node = await Idler.join(control)
        await node.ask()
        with pytest.raises(QuotaExceeded):  # one that runs is not final
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
def test_a_wrong_limit_is_named(tenants: Any, message: str) -> None:
    """Key, value, and what would be right."""
    with pytest.raises(ConfigError) as caught:
        ServerSettings(tenants=tenants)
    assert message in str(caught.value)
