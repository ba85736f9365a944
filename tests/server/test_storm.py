"""Many nodes lost at once, and many sessions given at once: bounded steps, few statements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from leased import Idler, a_task, names
from tugline.server.control import ControlPlane, expire
from tugline.server.store import leases, nodes, stats
from tugline.server.store.base import Tx


def _count_statements(tx: Tx, op: Callable[[], None]) -> int:
    count = 0

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **values: object) -> object:
            nonlocal count
            count += 1
            return call(*arguments, **values)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tx, "execute", counted(tx.execute))
        patch.setattr(tx, "many", counted(tx.many))
        op()
    return count


async def test_a_lost_node_costs_as_many_statements_whatever_it_held(control: ControlPlane) -> None:
    """Its sessions are returned to the queue together, not one by one."""
    counts = []
    for name, samples in (("small", 2), ("large", 64)):
        node = await Idler.join(control, name, room=samples)
        await control.submit([a_task(name, samples)])
        assert len((await node.ask()).work) == samples

        def lose(tx: Tx, node: str = node.node) -> int:
            return _count_statements(tx, lambda: leases.expire_node(tx, node, "gone"))

        counts.append(await control.database.write(lose))
    assert max(counts) < 16
    assert (await control.database.read(stats.counts)).sessions["queued"] == 66


async def test_lost_nodes_expire_a_few_at_a_time(control: ControlPlane) -> None:
    """Others can renew in between; in the end all are gone and all work is in the queue again."""
    for n in range(45):
        node = await Idler.join(control, f"n{n}", room=1)
        await control.submit([a_task(f"t{n}")])
        assert len((await node.ask()).work) == 1
    control.database.clock.ahead_s += 100
    steps = []
    while due := await control.database.read(nodes.list_expired):
        steps.append(len(due))
        await control.database.write(expire, lease_s=30.0)
    assert steps[0] == max(steps) == 20
    assert len(steps) > 1
    assert (await control.database.read(stats.counts)).sessions["queued"] == 45


async def test_what_is_beyond_one_grant_is_granted_next(
    control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound on each transaction leaves no node waiting beside a queue."""
    monkeypatch.setattr(leases, "_GRANTED", 3)
    waiting = [await Idler.join(control, name, room=3) for name in "abc"]
    asking = [await node.start_asking() for node in waiting]
    await control.submit([a_task(f"t{n}") for n in range(9)])
    answers = await asyncio.wait_for(asyncio.gather(*asking), 20)
    given = [name for answer in answers for name in names(answer.work)]
    while len(given) < 9:
        for node in waiting:
            given += names((await node.ask(wait_s=0.5)).work)
    assert sorted(given) == [f"t{n}-0" for n in range(9)]
