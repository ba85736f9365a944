"""Search of sessions by the text of their task, their failure and their note."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.control_plane import Earlier, Open, finish, read_pages, submit
from support.tasks import make_task
from tugline.errors import Missing
from tugline.protocol import EventKind, EventQuery, SessionQuery
from tugline.server.control import ControlPlane
from tugline.server.store import sessions, tasks
from tugline.server.store.base import Tx
from tugline.types import Status, Task


def task(name: str, instruction: str, samples: int = 2, **tags: str) -> Task:
    """A task that no node runs."""
    return make_task(name, samples, instruction=instruction, tags=tags)


def fill(tx: Tx) -> None:
    """Two tasks of one request, one of another, and a failure."""
    submit(tx, task("a", "Fix calc.py: add() subtracts.", kind="mend"), task("b", "Größe: 77 界"))
    submit(tx, task("c", "Fix the parser; o'neill said: \\ % * \" |", 3))
    finish(tx, "a-1", failure="exit code 137: out of memory_x")


async def find(control: ControlPlane, q: str, **query: Any) -> list[str]:
    """Ids of all pages that match."""
    return await read_pages(control, sessions.page, SessionQuery(q=q, **query))


async def test_search_in_tasks_and_failures(control: ControlPlane) -> None:
    """Terms match by prefix, those of two characters whole; all must be in one text."""
    await control.database.write(fill)
    for expected, queries in {
        "a-0 a-1 c-0 c-1 c-2": ("FIX",),
        "a-0 a-1": ("calc.py", "add() sub", "mend", "kind=mend"),
        "a-1": ("137", "memory_x", "a-1"),
        "b-0 b-1": ("größ", "77", "界"),
        "c-0 c-1 c-2": ("fix pars", "o'neill \\ % * \" |"),
        "": ("memory x", "fix 137", "ix", "sa", "' OR 1 --", "NOT (", ")"),
    }.items():
        for q in queries:
            assert await find(control, q) == expected.split(), q
            assert await find(control, q, newest=True) == expected.split()[::-1], q
    assert await find(control, "fix", status=Status.FAILED) == ["a-1"]
    assert await find(control, "fix", task="c") == ["c-0", "c-1", "c-2"]


@pytest.mark.parametrize("newest", [False, True])
async def test_search_pages_are_complete(control: ControlPlane, newest: bool) -> None:  # noqa: FBT001
    """A page may end in a task, in a request, or between matches of different kinds."""
    for n in range(3):
        batch = [task(f"t{n}{k}", "even" if k % 2 == 0 else "odd", 3) for k in range(4)]
        await control.database.write(submit, *batch)
        await control.database.write(finish, f"t{n}1-1", failure="an even failure")
        await control.database.write(finish, f"t{n}0-2", failure="an even failure")
    even = [f"t{n}{k}-{i}" for n in range(3) for k in range(4) for i in range(3) if k % 2 == 0]
    expected = sorted([*even, *(f"t{n}1-1" for n in range(3))], reverse=newest)
    for limit in (1, 2, 4, 100):
        assert await find(control, "even", newest=newest, limit=limit) == expected, limit
    failed = [one for one in expected if one.endswith(("0-2", "1-1"))]
    assert await find(control, "even", newest=newest, limit=1, status=Status.FAILED) == failed


@pytest.mark.parametrize("newest", [False, True])
async def test_search_is_combined_with_filters(control: ControlPlane, newest: bool) -> None:  # noqa: FBT001
    """Status, task and node filter the matches, wherever those are among many sessions."""
    tagged = [task(f"t{n:02}", "common", 2) for n in range(20)]
    await control.database.write(submit, *tagged, task("other", "different"))
    for session in ("t00-1", "t07-0", "t19-1", "other-1"):
        await control.database.write(finish, session, failure="a common cause")
    failed = sorted(["t00-1", "t07-0", "t19-1", "other-1"], reverse=newest)
    failed.sort(key=lambda session: session.startswith("other"), reverse=newest)
    for limit in (1, 2, 100):
        options = {"newest": newest, "limit": limit}
        assert await find(control, "comm", status=Status.FAILED, **options) == failed
        assert await find(control, "common", task="other", **options) == ["other-1"]
        assert await find(control, "common", task="t03", status=Status.FAILED, **options) == []
        assert await find(control, "common", node="none", **options) == []


@pytest.mark.parametrize("few_tasks", [sessions._FEW_TASKS, 1])
async def test_search_by_parts_of_ids(
    control: ControlPlane, monkeypatch: pytest.MonkeyPatch, few_tasks: int
) -> None:
    """Matches are in the order of submission, whether tasks or sessions are scanned.

    A number matches task ids and samples, however many tasks have no such sample.
    """
    monkeypatch.setattr(sessions, "_FEW_TASKS", few_tasks)
    samples = {"mend": 3, "later": 2, "few-12": 1, "many": 14}
    await control.database.write(submit, *(task(name, "x", n) for name, n in samples.items()))
    for q, expected in {
        "end-1": ["mend-1"],
        "mend": ["mend-0", "mend-1", "mend-2"],
        "mend-": ["mend-0", "mend-1", "mend-2"],
        "t": ["later-0", "later-1"],
        "12": ["few-12-0", "many-12"],
        "-1": ["mend-1", "later-1", "few-12-0", *(f"many-{n}" for n in (1, 10, 11, 12, 13))],
    }.items():
        assert await find(control, q) == expected, q
    for nothing in ("mend-3", "1111111", "-1111111", "d-1111111", "nothing", "99"):
        assert await find(control, nothing) == [], nothing


async def test_recently_changed_sessions_come_first(control: ControlPlane) -> None:
    """Queued sessions are left out; others are ordered by their last change."""
    write, now = control.database.write, time.time()
    await write(submit, task("a", "x", 3), task("b", "x", 1))
    for n, (session, status) in enumerate([("b-0", "run"), ("a-2", "failed"), ("a-0", "eval")]):
        change = "UPDATE sessions SET status = :status, updated = :at WHERE id = :id"
        await write(Tx.run, change, status=status, at=now + n, id=session)

    async def recent(**query: Any) -> list[str]:
        return await read_pages(control, sessions.page, SessionQuery(recent=True, **query))

    assert await recent() == ["a-0", "a-2", "b-0"]
    assert await recent(limit=1) == ["a-0", "a-2", "b-0"]
    assert await recent(task="a", status=Status.FAILED) == ["a-2"]


async def test_notes_are_stored_and_searched(control: ControlPlane) -> None:
    """A note is found beside the failure's text; an empty note is deleted."""
    write = control.database.write
    await write(fill)
    await write(sessions.write_note, "a-1", "ask Ann")
    await write(sessions.write_note, "b-0", "wrong checkout")
    await write(finish, "b-0", failure="no space")
    assert (await control.database.read(sessions.get, "b-0")).note == "wrong checkout"
    assert await find(control, "ann 137") == ["a-1"]
    assert await find(control, "checkout") == await find(control, "space") == ["b-0"]
    await write(sessions.write_note, "a-1", "")
    await write(sessions.write_note, "b-0", "")
    assert await find(control, "ann") == await find(control, "checkout") == []
    assert await find(control, "137") == ["a-1"]
    events = await control.events(EventQuery(after=0, limit=1000))
    noted = [one.session for one in events if one.kind is EventKind.NOTED]
    assert noted == ["a-1", "b-0", "a-1", "b-0"]
    with pytest.raises(Missing, match="unknown session 'x'"):
        await write(sessions.write_note, "x", "?")


async def test_deleted_tasks_are_not_found(control: ControlPlane) -> None:
    """Texts are deleted with their task."""
    write = control.database.write
    await write(fill)
    for session in ("a-0", "b-0"):
        await write(sessions.write_note, session, "noted")
    await write(finish, "a-0", failure="also bad")
    assert await write(tasks.delete_finished, time.time() + 60) == 1
    assert await find(control, "noted") == ["b-0"]
    assert await find(control, "fix") == ["c-0", "c-1", "c-2"]
    [(left,)] = await control.database.read(lambda tx: tx.all("SELECT COUNT(*) FROM texts"))
    assert left == 3  # two tasks and a note


async def test_a_migrated_store_is_searchable_from_then_on(
    open_earlier: Earlier, open_control: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old sessions are found by id; text is indexed for what comes after the migration."""
    with monkeypatch.context() as earlier:
        for name in ("add", "replace"):
            earlier.setattr(sessions.texts, name, lambda *_: None)
        earlier.setattr(sessions, "_COLUMNS", sessions._COLUMNS.replace(", note", ", ''"))
        async with open_earlier(4) as database:
            await database.write(submit, task("early", "Fix calc.py", kind="mend"))
            await database.write(finish, "early-1", failure="gone wrong")
    async with open_control() as control:
        await control.database.write(submit, task("late", "Fix calc.py", 1))
        await control.database.write(sessions.write_note, "early-0", "seen by Ann")
        assert await find(control, "fix") == ["late-0"]
        assert await find(control, "early") == ["early-0", "early-1"]
        assert await find(control, "ann") == ["early-0"]


async def test_a_store_of_layout_5_keeps_its_texts(
    open_earlier: Earlier, open_control: Open
) -> None:
    """The texts of the old layout are in the new indexes."""
    async with open_earlier(5) as database:
        await database.write(submit, task("early", "Fix calc.py"))
        await database.write(finish, "early-1", failure="gone wrong")
    async with open_control() as control:
        assert await find(control, "fix") == ["early-0", "early-1"]
        assert await find(control, "wrong", status=Status.FAILED) == ["early-1"]
