"""Rows of tasks: taken in once, however often they are sent; shown; looked through.

A body is packed once and never changed. What is asked of many tasks at a time stands in columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import zstandard

from tugline.errors import Conflict, Invalid, Missing
from tugline.protocol import Accepted, EventKind, Page, TaskState, TaskView
from tugline.server.store import events, tenants
from tugline.server.store.base import Row, Tx
from tugline.server.store.sessions import cursor
from tugline.types import Task, decode, encode

_AHEAD_S = 60.0
"""What one step of priority is worth: a place that much further ahead in the line."""
_SHARE = 64
"""Samples of one task that stand together; the next as many stand a minute behind."""
_CHUNK = 500
_COLUMNS = "id, place, tenant, priority, samples, created, usable, reason, released, tags"


class Packed(NamedTuple):
    """A task as it is kept."""

    task: Task
    body: bytes
    digest: str


def pack(task: Task) -> Packed:
    """Encode and compress."""
    data = encode(task)
    body = zstandard.ZstdCompressor(level=3).compress(data)
    return Packed(task, body, hashlib.sha256(data).hexdigest())


def unpack(body: bytes) -> Task:
    """The task of a row."""
    return decode(zstandard.ZstdDecompressor().decompress(body), Task)


# --------------------------------------------------------------------------- in
def submit(tx: Tx, batch: Sequence[Packed], now: float) -> list[Accepted]:
    """Keep these tasks with their sessions; those that are there already are left as they are.

    Raises `Conflict` when another task has the id of one of them.
    """
    known = _digests(tx, [packed.task.id for packed in batch])
    fresh: dict[str, Packed] = {}
    for n, packed in enumerate(batch):
        there = known.get(packed.task.id)
        if there is None:
            known[packed.task.id] = packed.digest
            fresh[packed.task.id] = packed
        elif there != packed.digest and _differs(tx, packed, fresh):
            msg = f"task {packed.task.id!r} was submitted before with other content; use another id"
            raise Conflict(msg, field=f"{n}.id")
    for tenant in sorted({packed.task.tenant for packed in fresh.values()}):
        tenants.activate(tx, tenant)
    if fresh:
        _insert(tx, list(fresh.values()), now)
    return [
        Accepted(
            task=packed.task.id,
            sessions=tuple(session_ids(packed.task)),
            new=packed.task.id in fresh,
        )
        for packed in batch
    ]


def session_ids(task: Task) -> Iterator[str]:
    """By sample."""
    return (f"{task.id}-{n}" for n in range(task.samples))


def _digests(tx: Tx, ids: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for start in range(0, len(ids), _CHUNK):
        named, values = among(ids[start : start + _CHUNK])
        found |= dict(tx.all(f"SELECT id, digest FROM tasks WHERE id IN ({named})", **values))  # noqa: S608 - constants
    return found


def _differs(tx: Tx, packed: Packed, fresh: dict[str, Packed]) -> bool:
    """Whether it is another task, and not the same one written by another version."""
    if packed.task.id in fresh:
        return True
    return body(tx, packed.task.id) != decode(encode(packed.task), Task)


def _insert(tx: Tx, batch: Sequence[Packed], now: float) -> None:
    sessions = sum(packed.task.samples for packed in batch)
    for name, n in (("tasks", len(batch)), ("sessions", sessions)):
        tx.run("UPDATE positions SET at = at + :n WHERE name = :name", name=name, n=n)
    [(last,)] = tx.all(
        "UPDATE positions SET at = at + :n WHERE name = 'places' RETURNING at",
        n=len(batch) + sessions,
    )
    places = iter(range(last - len(batch) - sessions + 1, last + 1))
    tx.many(
        "INSERT INTO tasks (id, place, tenant, priority, body, digest, samples, enough, deadline,"
        " attempts, max_staleness, on_stale, callback, tags, created) VALUES (:id, :place, :tenant,"
        " :priority, :body, :digest, :samples, :enough, :deadline, :attempts, :max_staleness,"
        " :on_stale, :callback, :tags, :now)",
        [_row(packed, next(places), now) for packed in batch],
    )
    tx.many(
        "INSERT INTO sessions (id, place, task, tenant, sample, status, turn, created, updated)"
        " VALUES (:id, :place, :task, :tenant, :sample, 'queued', :turn, :now, :now)",
        [
            {
                "id": session,
                "place": next(places),
                "task": task.id,
                "tenant": task.tenant,
                "sample": n,
                "turn": now + _AHEAD_S * (n // _SHARE - task.priority),
                "now": now,
            }
            for task, _, _ in batch
            for n, session in enumerate(session_ids(task))
        ],
    )
    accepted = [events.Note(task.id, detail={"samples": task.samples}) for task, _, _ in batch]
    events.add_all(tx, EventKind.ACCEPTED, accepted)
    tx.wake("work", "timers")


def _row(packed: Packed, place: int, now: float) -> dict[str, object]:
    task = packed.task
    group = task.group
    return {
        "id": task.id,
        "place": place,
        "tenant": task.tenant,
        "priority": task.priority,
        "body": packed.body,
        "digest": packed.digest,
        "samples": task.samples,
        "enough": group.min_usable,
        "deadline": None if group.deadline_s is None else now + group.deadline_s,
        "attempts": group.attempts,
        "max_staleness": group.max_staleness,
        "on_stale": group.on_stale.value,
        "callback": task.callback.url if task.callback else None,
        "tags": _tags(task.tags),
        "now": now,
    }


# --------------------------------------------------------------------------- out
def body(tx: Tx, task: str) -> Task:
    """The task as it was submitted. Raises `Missing`."""
    row = tx.one("SELECT body FROM tasks WHERE id = :task", task=task)
    if row is None:
        raise _missing(task)
    return unpack(row[0])


def view(tx: Tx, task: str) -> TaskView:
    """The task as it stands. Raises `Missing`."""
    rows = tx.all(f"SELECT {_COLUMNS} FROM tasks WHERE id = :task", task=task)  # noqa: S608 - constants
    if not rows:
        raise _missing(task)
    return _views(tx, rows)[0]


def views(tx: Tx, ids: Sequence[str]) -> list[TaskView]:
    """These tasks, all of which there are, as they stand and in this order."""
    named, values = among(ids)
    found = tx.all(f"SELECT {_COLUMNS} FROM tasks WHERE id IN ({named})", **values)  # noqa: S608 - constants
    rows = {row[0]: row for row in found}
    return _views(tx, [rows[task] for task in ids])


def page(
    tx: Tx,
    *,
    state: TaskState | None,
    tenant: str | None,
    tag: str | None,
    after: str | None,
    limit: int,
) -> Page:
    """Tasks in order of submission."""
    values: dict[str, object] = {"after": cursor(after), "limit": limit + 1}
    where = "place > :after"
    if state is not None:
        where += f" AND released IS {'NULL' if state is TaskState.OPEN else 'NOT NULL'}"
    if tenant is not None:
        values["tenant"] = tenant
        where += " AND tenant = :tenant"
    if tag is not None:
        values["tag"] = _tag(tag)
        # contains it: LIKE would ignore the case on one of the two stores
        where += " AND replace(tags, :tag, '') <> tags"
    rows = tx.all(
        f"SELECT {_COLUMNS} FROM tasks WHERE {where} ORDER BY place LIMIT :limit",  # noqa: S608 - constants
        **values,
    )
    more = str(rows[limit - 1][1]) if len(rows) > limit else None
    return Page(tasks=tuple(_views(tx, rows[:limit])), next=more)


def open_count(tx: Tx) -> int:
    """How many tasks have sessions that are not over."""
    at: dict[str, int] = dict(tx.all("SELECT name, at FROM positions"))
    return at["tasks"] - at["released"]


def among(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Names of parameters for ``IN (...)``, and their values."""
    values = {f"n{n}": name for n, name in enumerate(names)}
    return ", ".join(f":{name}" for name in values), values


def _views(tx: Tx, rows: Sequence[Row]) -> list[TaskView]:
    counts: dict[str, dict[str, int]] = {row[0]: {} for row in rows}
    over = [row[0] for row in rows if row[8] is not None]
    missing: dict[str, list[int]] = {task: [] for task in over}
    for start in range(0, len(rows), _CHUNK):
        named, values = among(row[0] for row in rows[start : start + _CHUNK])
        for task, status, n in tx.all(
            f"SELECT task, status, COUNT(*) FROM sessions WHERE task IN ({named})"  # noqa: S608 - constants
            " GROUP BY task, status",
            **values,
        ):
            counts[task][status] = n
    for start in range(0, len(over), _CHUNK):
        named, values = among(over[start : start + _CHUNK])
        for task, sample in tx.all(
            f"SELECT task, sample FROM sessions WHERE task IN ({named}) AND usable = 0"  # noqa: S608 - constants
            " ORDER BY task, sample",
            **values,
        ):
            missing[task].append(sample)
    return [_view(row, counts[row[0]], tuple(missing.get(row[0], ()))) for row in rows]


def _view(row: Row, counts: dict[str, int], missing: tuple[int, ...]) -> TaskView:
    task, _, tenant, priority, samples, created, usable, reason, released, tags = row
    return TaskView(
        id=task,
        tenant=tenant,
        priority=priority,
        state=TaskState.OPEN if released is None else TaskState.RELEASED,
        samples=samples,
        created=created,
        counts=counts,
        usable=usable,
        missing=missing,
        reason=reason,
        released=released,
        tags=json.loads(tags),
    )


def _tags(tags: dict[str, str]) -> str:
    return json.dumps(tags, sort_keys=True, separators=(",", ":"))


def _tag(tag: str) -> str:
    key, equals, value = tag.partition("=")
    if not equals:
        msg = f"tag is {tag!r}, must be KEY=VALUE"
        raise Invalid(msg, field="tag")
    return _tags({key: value})[1:-1]


def _missing(task: str) -> Missing:
    msg = f"no task {task!r}"
    return Missing(msg)
