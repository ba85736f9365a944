from __future__ import annotations

import time

import pytest

from support.control_plane import IdleNode, Open
from support.tasks import make_task
from tugline.errors import Missing
from tugline.protocol import ResultQuery
from tugline.server.control import ControlPlane
from tugline.server.store import results, sessions, stats, tasks
from tugline.server.store.base import Tx
from tugline.server.store.events import latest


async def finish_tasks(control: ControlPlane, *names: str) -> int:
    """Run tasks to their end; the position of the last release."""
    node = await IdleNode.at_work(control, *(make_task(name, 2) for name in names), room=100)
    for session in list(node.held):
        await node.commit(session)
    return max([(await control.database.read(tasks.view, name)).released or 0 for name in names])


async def test_acknowledged_tasks_are_deleted(control: ControlPlane) -> None:
    """Old tasks go with their results once all consumers have acknowledged them; counts stay."""
    read, write = control.database.read, control.database.write
    position = await finish_tasks(control, "a", "b")
    await control.submit([make_task("open")])
    delete, later = tasks.delete_finished, time.time() + 60
    await write(results.ack, "trainer", position - 1)
    await write(results.ack, "archive", position)
    assert await write(delete, later) == 1, "the last release is not acknowledged by all"
    await write(results.ack, "trainer", position)
    assert await write(delete, time.time() - 60) == 0, "too young"
    assert await write(delete, later) == 1
    assert await write(delete, later) == 0
    assert [one.id for one in (await read(tasks.page)).tasks] == ["open"]
    for op, gone in ((tasks.view, "a"), (sessions.get, "b-1"), (results.get, "a-0")):
        with pytest.raises(Missing):
            await read(op, gone)
    assert (await control.results(ResultQuery())).items == ()
    counts = await read(stats.counts)
    assert (counts.sessions, counts.tasks_open) == ({"completed": 4, "queued": 1}, 1)


async def test_the_id_of_a_deleted_task_can_be_reused(control: ControlPlane) -> None:
    """A task with another body may have the id of a deleted one."""
    position = await finish_tasks(control, "a")
    assert await control.database.write(tasks.delete_finished, time.time() + 60) == 1
    changed = make_task("a", tags={"other": "body"})
    await control.submit([changed])
    node = await IdleNode.join(control, "last")
    assert [work.task for work in (await node.ask()).work] == [changed]
    assert await control.database.read(latest) > position


async def test_tasks_with_undelivered_callbacks_are_kept(control: ControlPlane) -> None:
    """A task is kept while a pending or dead callback needs its result."""
    write = control.database.write
    await finish_tasks(control, "plain")
    insert = "INSERT INTO outbox (id, task, kind, url, host, state, next_try)"
    insert += " VALUES (1, 'plain', 'session.result', 'http://127.0.0.1:9/', 'x', 'dead', 0)"
    await write(Tx.run, insert)
    delete, later = tasks.delete_finished, time.time() + 60
    assert await write(delete, later) == 0
    await write(Tx.run, "UPDATE outbox SET state = 'delivered'")
    assert await write(delete, later) == 1


async def test_a_deleted_consumer_does_not_delay_deletion(control: ControlPlane) -> None:
    """Acknowledgements of a deleted consumer no longer count."""
    await finish_tasks(control, "a")
    await control.database.write(results.ack, "dead", 0)
    await control.database.write(results.delete_consumer, "dead")
    assert await control.database.write(tasks.delete_finished, time.time() + 60) == 1
    with pytest.raises(Missing, match="'dead'"):
        await control.database.write(results.delete_consumer, "dead")


async def test_a_silent_consumer_does_not_delay_deletion_for_ever(open_control: Open) -> None:
    """The consumer no longer counts after `keep_consumers_days`, but its position stays."""
    minute = 1 / 1440
    async with open_control(keep_tasks_days=minute, keep_consumers_days=10 * minute) as control:
        await finish_tasks(control, "a")
        await control.database.write(results.ack, "dead", 0)
        for ahead_s, left in ((500.0, 1), (700.0, 0)):
            await control.delete_old(time.time() + ahead_s)
            assert len((await control.database.read(tasks.page)).tasks) == left
        assert len(await control.database.read(results.list_consumers)) == 1
