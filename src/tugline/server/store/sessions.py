"""Sessions: their lists, stages, and requeueing.

`get_leased` is the fence: a node's message about a session is accepted only with the epoch of the
current lease (I3).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tugline import protocol
from tugline.errors import FencedError, Missing
from tugline.protocol import SessionOrder
from tugline.server.store import events, queues, texts
from tugline.server.store.base import (
    Row,
    Tx,
    cut_ordered,
    cut_page,
    match_columns,
    parse_ordered_cursor,
)
from tugline.types import STAGES, Session, Status

_FEW_TASKS = 100
"""Maximum number of tasks whose sessions are looked up by name."""
MAX_PAUSE_S = 60.0
"""Maximum pause of a session after an outage, in seconds."""


class SessionRow(NamedTuple):
    """Row of a session."""

    id: str
    place: int
    task: str
    tenant: str
    sample: int
    attempt: int
    faults: int
    outages: int
    failing_since: float | None
    epoch: int
    status: str
    node: str | None
    version: int
    stop: str | None
    stop_by: str
    created: float
    updated: float
    note: str
    run: str | None
    judges: str | None
    queued_s: float
    other_s: float
    leased_at: float

    @property
    def leased(self) -> bool:
        """Whether the session is leased to a node."""
        return self.status in STAGES

    def view(self) -> protocol.SessionView:
        """Convert the row to the view of the API."""
        return msgspec.convert({**self._asdict(), "stopping": self.stop_by}, protocol.SessionView)

    def session(self) -> Session:
        """Convert the row to the session that a node gets."""
        return msgspec.convert(self._asdict(), Session)


_COLUMNS = ", ".join(SessionRow._fields)
decode_view = msgspec.msgpack.Decoder(protocol.ResultView).decode
"""Decoder of the column ``results.view``."""


def get(tx: Tx, session: str) -> SessionRow:
    """Return a session. Raises `Missing`."""
    rows = select(tx, "id = :session", session=session)
    if not rows:
        raise Missing(f"unknown session {session!r}")
    return rows[0]


def get_leased(tx: Tx, session: str, epoch: int) -> SessionRow:
    """Return a session whose current lease has this `epoch`. Raises `FencedError`."""
    entry = get(tx, session)
    if entry.epoch != epoch or not entry.leased:
        msg = (
            f"session {session} is {entry.status} at epoch {entry.epoch}; the lease of epoch "
            f"{epoch} was lost"
        )
        raise FencedError(msg)
    return entry


def select(tx: Tx, where: str, **values: object) -> list[SessionRow]:
    """Return the sessions that match `where`, which is trusted SQL."""
    return [
        SessionRow(*row)
        for row in tx.all(f"SELECT {_COLUMNS} FROM sessions WHERE {where}", **values)  # noqa: S608 - constants
    ]


def page(tx: Tx, query: protocol.SessionQuery) -> protocol.Page:
    """Return sessions in order of submission, or newest first, and their results."""
    if query.order is not None or query.recent:
        rows, more = cut_ordered(_read_ordered(tx, query), query.limit)
    else:
        rows, more = cut_page(_read(tx, query), query.limit)
    ids = [row[0] for row in rows]
    ended = map(decode_view, tx.column("SELECT view FROM results WHERE session IN :ids", ids=ids))
    listed = tuple(SessionRow(*row).view() for row in rows)
    return protocol.Page(sessions=listed, results=tuple(ended), next=more)


def _read(tx: Tx, query: protocol.SessionQuery) -> list[Row]:
    """Return the rows of a page, and the next row."""
    where, values = _match(query)

    def read(having: str, **named: object) -> list[Row]:
        return tx.read_page(f"{_COLUMNS} FROM sessions", where + having, query, **values, **named)

    if not query.q:
        return read("")
    having, named = _match_part(tx, query.q)
    found = read(having, **named)
    words = texts.parse(query.q)
    for tasks in (False, True) if words else ():
        rows: list[Row] = []
        for condition in texts.find(tx, query, words, tasks=tasks):
            rows += read(f" AND {condition}", words=words, tasks=tasks)
            if len(rows) > query.limit:
                break
        found += rows
    return [row for _, row in sorted({row[1]: row for row in found}.items(), reverse=query.newest)]


def _match(
    query: protocol.SessionQuery, *, status_indexed: bool = True
) -> tuple[str, dict[str, object]]:
    """Return the condition of a query without its words, and its values.

    Without `status_indexed`, no index is used to find the status.
    """
    status = query.status
    where, values = match_columns(
        task=query.task, status=status if status_indexed else None, node=query.node, run=query.run
    )
    if status is not None and not status_indexed:
        where += " AND COALESCE(status, '') = :status"
        values["status"] = status.value
    for name, sign, reward in (("min", ">=", query.min_reward), ("max", "<=", query.max_reward)):
        if reward is not None:
            where += f" AND reward {sign} :{name}"
            values[name] = reward
    return where, values


_ORDERS = {
    SessionOrder.HIGHEST: ("reward", "DESC"),
    SessionOrder.LOWEST: ("reward", "ASC"),
    SessionOrder.LONGEST: ("seconds", "DESC"),
    SessionOrder.SHORTEST: ("seconds", "ASC"),
    None: ("updated", "DESC"),
}
"""Columns and directions of orders; None: the last changed first, without the queue."""


def _read_ordered(tx: Tx, query: protocol.SessionQuery) -> list[Row]:
    """Return the rows of a page in another order than that of submission, and the next row.

    The value that they are ordered by is the last column, for `cut_ordered`.
    """
    by, direction = _ORDERS[query.order]
    # Most sessions are completed: from the index of the status, they would have to be sorted.
    where, values = _match(query, status_indexed=query.status is not Status.COMPLETED)
    if query.after is not None:
        last, place = parse_ordered_cursor(query.after)
        where += f" AND ({by}, place) {'<' if direction == 'DESC' else '>'} (:last, :place)"
        values |= {"last": last, "place": place}
    known = f"{by} IS NOT NULL" if query.order else "status <> 'queued'"
    return tx.all(
        f"SELECT {_COLUMNS}, {by} FROM sessions WHERE {known}{where}"  # noqa: S608 - constants
        f" ORDER BY {by} {direction}, place {direction} LIMIT :limit",
        limit=query.limit + 1,
        **values,
    )


def _match_part(tx: Tx, part: str) -> tuple[str, dict[str, object]]:
    """Return a condition that an id, ``TASK-SAMPLE``, contains `part`, and its values.

    Tasks are searched first, since they are fewer than sessions. A part of many tasks' ids matches
    sessions early in the order of the page, so then sessions are searched directly.
    """
    values: dict[str, object] = {"q": part}
    where = " AND replace(id, :q, '') <> id"  # "contains", as for tags
    number = re.fullmatch(r"-?(\d{0,5})", part)  # may match a sample's number
    named = part if number else re.sub(r"-\d{0,5}$", "", part)
    also = f" OR samples > {int(number[1] or 0)}" if number else ""
    tasks = f"SELECT id FROM tasks WHERE replace(id, :part, '') <> id{also} LIMIT :limit"  # noqa: S608 - a number
    found = [] if " " in part else tx.column(tasks, part=named, limit=_FEW_TASKS + 1)
    if len(found) > _FEW_TASKS:
        return where, values
    where += " AND task IN :tasks" if found else " AND FALSE"
    return where, {**values, "tasks": found}


def requeue(
    tx: Tx,
    entries: Sequence[SessionRow],
    reason: str,
    counters: Sequence[str] = ("attempt",),
    *,
    elsewhere: bool = False,
) -> None:
    """Return leased sessions to their places in the queue; increment `counters`.

    With `elsewhere`, another node gets them if there is one with capacity. From its second outage
    on, a session is not leased for a pause that doubles each time.
    """
    for tenant in dict.fromkeys(entry.tenant for entry in entries):
        queues.activate_tenant(tx, tenant)
    outage = "outages" in counters
    rows = []
    notes = []
    for entry in entries:
        pause_s = min(2.0 ** min(entry.outages - 1, 10), MAX_PAUSE_S)
        first = outage and entry.failing_since is None
        row: dict[str, object] = {
            "failing_since": tx.now if first else entry.failing_since,
            "retry_at": tx.now + pause_s if outage and entry.outages else None,
            "avoid": entry.node if elsewhere else None,
            **_count_time(tx, entry),
            **{name: getattr(entry, name) + 1 for name in counters},
        }
        rows.append(row | {"id": entry.id, "now": tx.now})
        attempt = entry.attempt + ("attempt" in counters)
        detail: dict[str, str | int | float] = {"reason": reason, "attempt": attempt}
        notes.append(events.Note(entry.task, entry.id, entry.node, detail))
    changes = ", ".join(f"{name} = :{name}" for name in row)
    changes += ", status = 'queued', updated = :now, node = NULL, stop = NULL, stop_by = ''"
    tx.many(f"UPDATE sessions SET {changes}, stop_at = NULL WHERE id = :id", rows)  # noqa: S608 - constants
    events.add(tx, protocol.EventKind.REQUEUED, *notes)
    tx.notify("work", "timers")


def _count_time(tx: Tx, entry: SessionRow) -> dict[str, float]:
    """Return the seconds before the next attempt: in the queue, and in earlier attempts."""
    waited_s = tx.count_since(entry.updated) if entry.status == Status.QUEUED else 0.0
    lost_s = tx.count_since(entry.leased_at) if entry.leased else 0.0
    return {"queued_s": entry.queued_s + waited_s, "other_s": entry.other_s + lost_s}


def write_note(tx: Tx, session: str, text: str) -> None:
    """Replace the note on a session; an empty text removes it. Raises `Missing`."""
    entry = get(tx, session)
    tx.update("sessions", session, note=text)
    result = tx.fetch_value("SELECT view FROM results WHERE session = :session", session=session)
    failure = decode_view(result).failure if result else None
    texts.replace(tx, entry.place, f"{text} {failure.message if failure else ''}")
    events.add(tx, protocol.EventKind.NOTED, events.Note(entry.task, session, entry.node))


def end_lease(tx: Tx, entry: SessionRow, status: Status, **columns: object) -> None:
    """End the lease of a session, if it has one, with a new `status`; also set `columns`."""
    free = {"node": None, "stop": None, "stop_by": "", "stop_at": None}
    tx.update("sessions", entry.id, status=status.value, updated=tx.now, **free, **columns)


def end_pauses(tx: Tx) -> None:
    """End the pauses of sessions after an outage that are over."""
    if tx.run("UPDATE sessions SET retry_at = NULL WHERE retry_at <= :now", now=tx.now):
        tx.notify("work")


def stop(tx: Tx, entries: Sequence[SessionRow], reason: protocol.StopKind, by: str) -> None:
    """Request the nodes of leased sessions to stop them."""
    tx.many(
        "UPDATE sessions SET stop = :reason, stop_by = :by, stop_at = :now WHERE id = :id",
        [{"id": entry.id, "reason": reason.value, "by": by, "now": tx.now} for entry in entries],
    )
    detail = {"reason": reason.value, "by": by}
    stopping = [events.Note(entry.task, entry.id, entry.node, detail) for entry in entries]
    if stopping:
        events.add(tx, protocol.EventKind.STOPPING, *stopping)
    tx.notify("timers", *(f"node:{entry.node}" for entry in entries))


def advance(tx: Tx, entry: SessionRow, reported: protocol.HeldSession) -> None:
    """Record the stage that a node reports; ignore a stage before the recorded one."""
    if reported.status in STAGES and STAGES.index(reported.status) > STAGES.index(entry.status):
        tx.update("sessions", entry.id, status=reported.status.value, updated=tx.now)
