"""Tasks: idempotent submission, views, pages, retention.

A body is packed once and never changes. Fields that are queried for many tasks have columns.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import zstandard
from msgspec.structs import replace

from tugline.errors import Conflict, Missing, QuotaExceeded
from tugline.protocol import Accepted, EventKind, Page, TaskQuery, TaskState, TaskView
from tugline.server.settings import DEFAULTS, ServerSettings
from tugline.server.store import events, queues, runs, texts
from tugline.server.store.base import Row, Tx, cut_page, match_columns, to_struct
from tugline.types import Status, Task, decode, encode, is_held_out, name_problem

_PRIORITY_S = 60.0
"""Seconds by which each step of priority moves a task ahead in the queue."""
_BURST = 64
"""Samples of a task that are queued together; each next batch is queued a minute later."""
_DELETE_BATCH = 100
"""Number of tasks deleted per transaction."""
_COLUMNS = (
    "id, place, tenant, priority, samples, created, usable, reason, released, tags, run, judges"
)


class Packed(NamedTuple):
    """Task in its stored form."""

    task: Task
    body: bytes
    digest: str


def pack(task: Task) -> Packed:
    """Encode and compress a task."""
    data = encode(task)
    body = zstandard.ZstdCompressor(level=3).compress(data)
    return Packed(task, body, hashlib.sha256(data).hexdigest())


@lru_cache(maxsize=64)
def unpack(body: bytes) -> Task:
    """Decode the task of a row."""
    return decode(zstandard.ZstdDecompressor().decompress(body), Task)


# --------------------------------------------------------------------------- submission
def submit(
    tx: Tx, batch: Sequence[Packed], settings: ServerSettings = DEFAULTS, run: str | None = None
) -> list[Accepted]:
    """Insert tasks of a run with their sessions; existing tasks are not changed.

    Raises `Conflict` if a different task has the same id, `Missing` for an unknown run, and
    `QuotaExceeded`.
    """
    if run is not None:
        runs.require(tx, run)
    ids = [packed.task.id for packed in batch]
    known: dict[str, str] = dict(tx.all("SELECT id, digest FROM tasks WHERE id IN :ids", ids=ids))
    fresh: dict[str, Packed] = {}
    for n, packed in enumerate(batch):
        digest = known.get(packed.task.id)
        if digest is None:
            known[packed.task.id] = packed.digest
            fresh[packed.task.id] = packed
        elif digest != packed.digest and _differs(tx, packed, fresh):
            msg = (
                f"task {packed.task.id!r} was already submitted with different content; use "
                "another id"
            )
            raise Conflict(msg, field=f"{n}.id")
    for tenant in sorted({packed.task.tenant for packed in fresh.values()}):
        if most := settings.find_tenant(tenant).queued:
            more = (new.task.samples for new in fresh.values() if new.task.tenant == tenant)
            _check_quota(tx, tenant, sum(more), most)
        queues.activate_tenant(tx, tenant)
    if fresh:
        _insert(tx, list(fresh.values()), run)
    return [
        Accepted(
            task=packed.task.id,
            sessions=tuple(session_ids(packed.task)),
            new=packed.task.id in fresh,
        )
        for packed in batch
    ]


def raise_samples(tx: Tx, batch: Sequence[Packed]) -> None:
    """Add sessions to stored tasks that are the same but for fewer samples.

    Raises `Conflict` if a stored task has more.
    """
    for packed in batch:
        task = packed.task
        with contextlib.suppress(Missing):
            old = body(tx, task.id)
            if old.samples == task.samples or replace(old, samples=task.samples) != task:
                continue  # `submit` reports a different task
            if old.samples > task.samples:
                msg = (
                    f"task {task.id!r} has {old.samples} samples on this server; they can be "
                    "raised, but"
                )
                raise Conflict(f"{msg} not lowered to {task.samples}", field="samples")
            more = task.samples - old.samples
            last = tx.advance("places", more)
            tx.advance("sessions", more)
            new = {"samples": task.samples, "body": packed.body, "digest": packed.digest}
            tx.run(
                "UPDATE tasks SET samples = :samples, body = :body, digest = :digest"
                " WHERE id = :id",
                id=task.id,
                **new,
            )
            places = iter(range(last - more + 1, last + 1))
            run = view(tx, task.id).run
            tx.insert("sessions", *_session_rows(task, old.samples, places, tx.now, run))
            tx.notify("work", "timers")


def session_ids(task: Task) -> Iterator[str]:
    """Return the ids of a task's sessions, by sample."""
    return (f"{task.id}-{n}" for n in range(task.samples))


def _differs(tx: Tx, packed: Packed, fresh: dict[str, Packed]) -> bool:
    """Whether the stored task is different, not only encoded by another version."""
    if packed.task.id in fresh:
        return True
    return body(tx, packed.task.id) != decode(encode(packed.task), Task)


def _check_quota(tx: Tx, tenant: str, more: int, most: int) -> None:
    """Check the limit of unfinished sessions. Raises `QuotaExceeded`."""
    query = "SELECT COUNT(*) FROM sessions WHERE tenant = :tenant AND"
    parts = ("status = 'queued' AND turn > 0", "node IS NOT NULL")  # each uses its own index
    have = sum(tx.fetch_value(f"{query} {part}", tenant=tenant) for part in parts)
    if have + more > most:
        msg = f"tenant is {tenant!r}, which has {have} of at most {most} unfinished sessions"
        advice = (
            f"{more} more exceed it: submit {max(0, most - have)} now, and the others as "
            "sessions end"
        )
        raise QuotaExceeded(f"{msg}; {advice}", field="tenant")


def _insert(tx: Tx, batch: Sequence[Packed], run: str | None) -> None:
    samples = sum(packed.task.samples for packed in batch)
    tx.advance("tasks", len(batch))
    tx.advance("sessions", samples)
    last = tx.advance("places", len(batch) + samples)
    places = iter(range(last - len(batch) - samples + 1, last + 1))
    tx.insert("tasks", *(_row(packed, next(places), tx.now, run) for packed in batch))
    rows = [row for task, _, _ in batch for row in _session_rows(task, 0, places, tx.now, run)]
    tx.insert("sessions", *rows)
    searched = (texts.join_task(task.instruction, task.tags) for task, _, _ in batch)
    texts.add(tx, zip((-row["place"] for row in rows if row["sample"] == 0), searched, strict=True))
    accepted = [events.Note(task.id, detail={"samples": task.samples}) for task, _, _ in batch]
    events.add(tx, EventKind.ACCEPTED, *accepted)
    tx.notify("work", "timers")


def _session_rows(
    task: Task, start: int, places: Iterator[int], now: float, run: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task's sessions from sample `start` on."""
    judged = task.judges
    for n, session in enumerate(session_ids(task)):
        if n >= start:
            yield {
                "id": session,
                "place": next(places),
                "task": task.id,
                "tenant": task.tenant,
                "sample": n,
                "status": Status.QUEUED.value,
                "turn": now + _PRIORITY_S * (n // _BURST - task.priority),
                "created": now,
                "updated": now,
                "run": run,
                "judges": judged.session if judged else None,
                "pinned": judged.node if judged else "",
                "problem": name_problem(task.id, task.tags),
                "held_out": int(is_held_out(task.id, task.tags)),
            }


def _row(packed: Packed, place: int, now: float, run: str | None) -> dict[str, object]:
    task = packed.task
    group = task.group
    same = {name: getattr(task, name) for name in ("id", "tenant", "priority", "samples")}
    bounds = ("min_usable", "attempts", "retry_s", "max_staleness")
    return {
        **same,
        **{name: getattr(group, name) for name in bounds},
        "place": place,
        "body": packed.body,
        "digest": packed.digest,
        "deadline": None if group.deadline_s is None else now + group.deadline_s,
        "on_stale": group.on_stale.value,
        "callback": task.callback.url if task.callback else None,
        "tags": _encode_tags(task.tags),
        "created": now,
        "run": run,
        "judges": task.judges.session if task.judges else None,
    }


# --------------------------------------------------------------------------- reading
def body(tx: Tx, task: str) -> Task:
    """Return a task as submitted. Raises `Missing`."""
    query = "SELECT body FROM tasks WHERE id = :task"
    return unpack(tx.require_one(query, _missing(task), task=task)[0])


def view(tx: Tx, task: str) -> TaskView:
    """Return the current state of a task. Raises `Missing`."""
    query = f"SELECT {_COLUMNS} FROM tasks WHERE id = :task"  # noqa: S608 - constants
    return _views(tx, [tx.require_one(query, _missing(task), task=task)])[0]


def of_delivery(tx: Tx, delivery: str) -> TaskView:
    """Return the task of a webhook delivery. Raises `Missing`."""
    query = "SELECT task FROM outbox WHERE id = :id"
    [task] = tx.require_one(query, Missing(f"unknown delivery {delivery}"), id=int(delivery))
    return view(tx, task)


def views(tx: Tx, ids: Sequence[str]) -> list[TaskView]:
    """Return the current states of existing tasks, in the order of `ids`."""
    found = tx.all(f"SELECT {_COLUMNS} FROM tasks WHERE id IN :ids", ids=ids)  # noqa: S608 - constants
    rows = {row[0]: row for row in found}
    return _views(tx, [rows[task] for task in ids])


def page(tx: Tx, query: TaskQuery = TaskQuery()) -> Page:  # noqa: B008 - immutable
    """Return tasks in order of submission, or newest first."""
    where, values = match_columns(tenant=query.tenant, run=query.run)
    if query.state is not None:
        where += f" AND released IS {'NULL' if query.state is TaskState.OPEN else 'NOT NULL'}"
    if query.tag is not None:
        key, _, value = query.tag.partition("=")
        values["tag"] = _encode_tags({key: value})[1:-1]
        # "contains"; LIKE ignores case in SQLite
        where += " AND replace(tags, :tag, '') <> tags"
    found = tx.read_page(f"{_COLUMNS} FROM tasks", where, query, **values)
    rows, more = cut_page(found, query.limit)
    return Page(tasks=tuple(_views(tx, rows)), next=more)


def _views(tx: Tx, rows: Sequence[Row]) -> list[TaskView]:
    ids = [row[0] for row in rows]
    counts: dict[str, dict[str, int]] = {row[0]: {} for row in rows}
    for task, status, n in tx.all(
        "SELECT task, status, COUNT(*) FROM sessions WHERE task IN :ids GROUP BY task, status",
        ids=ids,
    ):
        counts[task][status] = n
    missing: dict[str, list[int]] = {row[0]: [] for row in rows}
    for task, sample in tx.all(
        "SELECT task, sample FROM sessions JOIN tasks ON tasks.id = task"
        " WHERE task IN :ids AND released IS NOT NULL AND sessions.usable = 0"
        " ORDER BY task, sample",
        ids=ids,
    ):
        missing[task].append(sample)
    return [
        to_struct(
            TaskView,
            _COLUMNS,
            row,
            state=TaskState.OPEN if row[8] is None else TaskState.RELEASED,
            counts=counts[row[0]],
            missing=tuple(missing[row[0]]),
            tags=json.loads(row[9]),
        )
        for row in rows
    ]


def _encode_tags(tags: dict[str, str]) -> str:
    return json.dumps(tags, sort_keys=True, separators=(",", ":"))


def _missing(task: str) -> Missing:
    return Missing(f"unknown task {task!r}")


# --------------------------------------------------------------------------- retention
def delete_finished(tx: Tx, before: float, alive: float = 0.0) -> int:
    """Delete a batch of tasks that ended before `before`; return their number, 0 when done.

    Tasks with pending callbacks, or not acknowledged by a consumer, are not deleted (I3); consumers
    without an acknowledgement since `alive` are ignored. Counters still include deleted tasks, and
    their ids may be used again.
    """
    acked = tx.fetch_value("SELECT MIN(acked) FROM consumers WHERE updated >= :alive", alive=alive)
    ids = tx.column(
        "SELECT id FROM tasks WHERE released <= :acked"
        " AND id NOT IN (SELECT task FROM outbox WHERE state <> 'delivered')"
        " AND NOT EXISTS (SELECT 1 FROM sessions WHERE task = tasks.id AND updated >= :before)"
        " ORDER BY released LIMIT :limit",
        acked=events.latest(tx) if acked is None else acked,
        before=before,
        limit=_DELETE_BATCH,
    )
    judged = "SELECT id FROM sessions WHERE task IN :ids"
    tx.run(f"DELETE FROM verdicts WHERE session IN ({judged})", ids=ids)  # noqa: S608 - constants
    for table, column in (("results", "task"), ("sessions", "task"), ("tasks", "id")):
        tx.run(f"DELETE FROM {table} WHERE {column} IN :ids", ids=ids)  # noqa: S608 - constants
    return len(ids)
