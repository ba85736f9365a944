from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.control_plane import Open, finish, record_statements, submit
from support.tasks import make_task
from tugline.errors import Invalid
from tugline.protocol import Event, EventKind, EventQuery, ResultQuery, Results
from tugline.server.blobs import LocalBlobs
from tugline.server.control import ControlPlane, sweep
from tugline.server.store import events, results, stats
from tugline.server.store.base import Tx
from tugline.server.store.database import Database, open_database


async def _finish_tasks(database: Database, **samples: int) -> None:
    """Submit tasks of these names and finish all their samples, the last ones first."""
    await database.write(submit, *(make_task(name, count) for name, count in samples.items()))
    for name, count in samples.items():
        for n in reversed(range(count)):
            await database.write(finish, f"{name}-{n}", n / 4)


def _ids(page: Results) -> list[str]:
    return [item.session for item in page.items]


@pytest.mark.parametrize(
    ("op", "limit", "expected"),
    [
        (results.page, 2, ["a-3 a-2", "a-1 a-0", "b-1 b-0", "c-0"]),
        (results.groups, 3, ["a-0 a-1 a-2 a-3", "b-0 b-1 c-0"]),
        (results.groups, 6, ["a-0 a-1 a-2 a-3 b-0 b-1", "c-0"]),
    ],
)
async def test_results_are_read_in_pages(
    database: Database, op: Callable[..., Results], limit: int, expected: list[str]
) -> None:
    """Pages follow the order of commits, or hold as many whole groups as fit, at least one."""
    await _finish_tasks(database, a=4, b=2, c=1)
    pages, cursor = [], 0
    while (page := await database.read(op, cursor, limit)).items:
        pages.append(" ".join(_ids(page)))
        cursor = page.cursor
    assert pages == expected
    assert page.cursor == cursor, "the cursor stays where there is nothing new"


async def test_a_consumer_resumes_at_its_acknowledged_position(database: Database) -> None:
    """An older cursor changes nothing, one from the future is refused."""
    await _finish_tasks(database, a=3)
    latest = await database.read(events.latest)
    assert await database.read(results.read_acked, "grpo") == 0
    for cursor, kept in ((2, 2), (4, 4), (3, 4), (latest, latest), (0, latest)):
        assert (await database.write(results.ack, "grpo", cursor)).acked == kept
        assert await database.read(results.read_acked, "grpo") == kept
    for wrong in (-1, latest + 1):
        with pytest.raises(Invalid, match=rf"cursor is {wrong}, .* \(at most {latest}\)"):
            await database.write(results.ack, "grpo", wrong)
    await database.write(results.ack, "eval", 1)
    known = await database.read(results.list_consumers)
    assert [(one.name, one.acked) for one in known] == [("eval", 1), ("grpo", latest)]


async def test_trimming_events_keeps_results(database: Database) -> None:
    """Only old events are trimmed; new positions continue after the trimmed ones."""
    await _finish_tasks(database, a=2)
    latest = await database.read(events.latest)
    assert await database.write(events.trim, time.time() - 60) == 0
    assert await database.write(events.trim, time.time() + 60) == latest
    assert await database.read(events.page, 0, 100) == []
    assert len((await database.read(results.page, 0, 100)).items) == 2
    joined = await database.write(
        lambda tx: events.add(tx, EventKind.JOINED, events.Note(node="n"))
    )
    assert joined == latest + 1


async def test_blobs_without_a_result_are_swept(database: Database, tmp_path: Path) -> None:
    """A blob that an expired lease had stored for the same session is deleted, too."""
    await database.write(submit, make_task("a.b", 2))
    await database.write(finish, "a.b-0", 1.0, blob="a.b-0.2.new")
    blobs = LocalBlobs(tmp_path / "blobs")
    for name in ("a.b-0.2.new", "a.b-0.1.old", "a.b-1.1.never", "gone-0.1.x"):
        await blobs.put(name, b"x")
    await sweep(blobs, database)
    assert len(list((tmp_path / "blobs").glob("*/*"))) == 4, "they may be about to get their row"
    await sweep(blobs, database, older_s=-60.0)
    assert [path.name for path in (tmp_path / "blobs").glob("*/*")] == ["a.b-0.2.new"]


def _explain(tx: Tx, op: Callable[[Tx], object]) -> str:
    with record_statements(tx) as seen:
        op(tx)
    plans = [tx.execute(f"EXPLAIN QUERY PLAN {sql}", defaultdict(int)) for sql in [*seen]]
    return "; ".join(row[-1] for plan in plans for row in plan)


async def test_pages_use_an_index(tmp_path: Path) -> None:
    """Neither a page nor a filter scans more rows than it returns.

    PostgreSQL plans by statistics, so that its plan for an empty table means nothing.
    """
    page = {"after": 1, "limit": 9}
    run = {**page, "run": "a"}
    due = partial(events.claim_deliveries, host="h", for_s=1.0, limit=4)
    async with open_database(f"sqlite:{tmp_path / 'tugline.db'}") as database:
        for index, op in {
            "results_delivered (position>?)": partial(results.page, **page),
            "results_of_run (run=? AND position>?)": partial(results.page, **run),
            "results_of_task (task=? AND position>?)": partial(results.page, **page, tasks=["a"]),
            "tasks_delivered (released>?)": partial(results.groups, **page),
            "tasks_released_of_run (run=? AND released>?)": partial(results.groups, **run),
            "outbox_due (host=? AND next_try<?)": due,
            "outbox_due (host>?)": events.next_tries,
        }.items():
            plan = await database.write(_explain, op)
            assert f"SEARCH {index}" in plan or f"INDEX {index}" in plan, plan


async def test_a_position_of_a_wiped_store_is_before_all_new_results(
    open_control: Open, wipe_store: Callable[[], None]
) -> None:
    """A reader gets all new results, however many the old and the new store have."""
    async with open_control() as control:
        await control.submit([make_task("t", 2)])
        await control.database.write(results.cancel_task, "t", by="me")
        position = (await control.results(ResultQuery())).cursor
    wipe_store()
    async with open_control(ahead_s=1.0) as control:
        await control.submit([make_task("t", 9)])
        await control.database.write(results.cancel_task, "t", by="me")
        again = await control.results(ResultQuery(after=position))
    assert len(again.items) == 9


async def test_a_position_beyond_the_latest_is_refused(control: ControlPlane) -> None:
    """A reader with such a position gets an error, since it would never see new results."""
    ahead = await control.database.read(events.latest) + 5000
    with pytest.raises(Invalid, match=rf"after is {ahead}, but the latest .* \d+: .* restored"):
        await control.results(ResultQuery(after=ahead))
    with pytest.raises(Invalid, match=f"after is {ahead}"):
        await control.events(EventQuery(after=ahead))


async def test_readers_wait_for_single_tasks(control: ControlPlane) -> None:
    """Results, groups and events of a task wake its readers; those of another do not."""
    await control.submit([make_task("a"), make_task("b")])
    after = (await control.database.read(stats.counts)).position
    waits = (
        control.results(ResultQuery(task=("a",), wait_s=9.0)),
        control.results(ResultQuery(task=("x", "a"), groups=True, wait_s=9.0)),
        control.events(EventQuery(after=after, task="a", wait_s=9.0)),
    )
    waiting = [asyncio.ensure_future(wait) for wait in waits]
    await control.database.write(finish, "b-0", 1.0)
    await control.database.read(events.latest)
    assert not any(task.done() for task in waiting)
    await control.database.write(finish, "a-0", 1.0)
    async with asyncio.timeout(8):
        page, groups, recorded = await asyncio.gather(*waiting)
    assert _ids(page) == _ids(groups) == ["a-0"]
    assert [event.kind for event in recorded] == [EventKind.RESULT, EventKind.RELEASED]


async def test_events_are_recorded_in_order(database: Database) -> None:
    """Every result and release has an event at its own position, of its task and of all."""
    await _finish_tasks(database, a=2, b=1)
    listed: list[Event] = await database.read(events.page, 0, 100)
    assert [event.position for event in listed] == list(range(1, len(listed) + 1))
    result, released = EventKind.RESULT, EventKind.RELEASED
    assert [event.kind for event in listed[2:]] == [result, result, released, result, released]
    assert [event.task for event in listed[2:]] == ["a", "a", "a", "b", "b"]
    assert await database.read(events.page, 2, 3) == listed[2:5]
    of_b = await database.read(events.page, 0, 100, "b")
    assert of_b == [event for event in listed if event.task == "b"]
    assert listed[2].session == "a-1"
    assert listed[2].detail.items() >= {"status": "completed", "sample": 1, "reward": 0.25}.items()
    items = (await database.read(results.page, 0, 100)).items
    assert [item.position for item in items] == [listed[n].position for n in (2, 3, 5)]
