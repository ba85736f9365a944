"""Sessions: their queue, their stages, and the return to the queue.

`get_leased` is the fence: a message of a node about a session counts only with the epoch of its
present lease (I3).

The queue is fair by stride scheduling over tenants. A tenant's `pass` grows by ``1 / weight`` with
each session leased, and the lowest pass is served first, so tenants with work share the nodes by
their weights at any load. A tenant that gets work again starts level with the others: time without
work earns nothing.
"""

import functools
import heapq
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tugline import protocol
from tugline.errors import FencedError, Missing
from tugline.server.settings import ServerSettings
from tugline.server.store import events, texts
from tugline.server.store.base import Row, Tx, cut_page, match_columns
from tugline.types import STAGES, Session, Status

_FEW_TASKS = 100
"""Tasks whose sessions are looked up by name."""
_LEASED = "SELECT tenant, COUNT(*) FROM sessions WHERE node IS NOT NULL GROUP BY tenant"
MAX_PAUSE_S = 60.0
"""The longest pause of a session after an outage."""


class SessionRow(NamedTuple):
    """A session's row."""

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

    @property
    def leased(self) -> bool:
        """Whether a node holds it."""
        return self.status in STAGES

    def view(self) -> protocol.SessionView:
        """Its state as the API shows it."""
        return msgspec.convert({**self._asdict(), "stopping": self.stop_by}, protocol.SessionView)

    def session(self) -> Session:
        """The session as its node gets it."""
        return msgspec.convert(self._asdict(), Session)


_COLUMNS = ", ".join(SessionRow._fields)
decode_view = msgspec.msgpack.Decoder(protocol.ResultView).decode
"""Of the column ``results.view``."""


def get(tx: Tx, session: str) -> SessionRow:
    """One session. Raises `Missing`."""
    found = select(tx, "id = :session", session=session)
    if not found:
        raise Missing(f"no session {session!r}")
    return found[0]


def get_leased(tx: Tx, session: str, epoch: int) -> SessionRow:
    """One session, if `epoch` is that of its present lease. Raises `FencedError`."""
    entry = get(tx, session)
    if entry.epoch != epoch or not entry.leased:
        msg = f"session {session} is {entry.status} at epoch {entry.epoch}; {epoch} is lost"
        raise FencedError(msg)
    return entry


def select(tx: Tx, where: str, **values: object) -> list[SessionRow]:
    """Sessions that match `where`, which is trusted SQL."""
    return [
        SessionRow(*row)
        for row in tx.all(f"SELECT {_COLUMNS} FROM sessions WHERE {where}", **values)  # noqa: S608 - constants
    ]


def page(tx: Tx, query: protocol.SessionQuery) -> protocol.Page:
    """Sessions in order of submission, or the newest first, and their results."""
    rows, more = cut_page(_read(tx, query), query.limit)
    ids = [row[0] for row in rows]
    ended = tx.column("SELECT view FROM results WHERE session IN :ids", ids=ids)
    return protocol.Page(
        sessions=tuple(SessionRow(*row).view() for row in rows),
        results=tuple(map(decode_view, ended)),
        next=more,
    )


def _read(tx: Tx, query: protocol.SessionQuery) -> list[Row]:
    """Rows of a page, and the one after it."""
    where, values = match_columns(task=query.task, status=query.status, node=query.node)

    def read(having: str, **named: object) -> list[Row]:
        return tx.read_places(f"{_COLUMNS} FROM sessions", where + having, query, **values, **named)

    if query.recent:
        begun = f"status <> 'queued'{where} ORDER BY updated DESC LIMIT :limit"
        return [*select(tx, begun, limit=query.limit, **values)]
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


def _match_part(tx: Tx, part: str) -> tuple[str, dict[str, object]]:
    """A condition that an id, ``TASK-SAMPLE``, contains `part`, and its values.

    Tasks are searched first: they are fewer than sessions. A part that is in many of them is soon
    found in sessions, too, in whose order the page is read.
    """
    values: dict[str, object] = {"q": part}
    where = " AND replace(id, :q, '') <> id"  # "contains", as for tags
    number = re.fullmatch(r"-?(\d{0,5})", part)  # a task with more samples may have such a one
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
    """Put leased sessions back at their places in the line; `counters` are raised by one.

    With `elsewhere` another node gets them, if one has capacity. From its second outage on each
    waits before it is leased again, every time twice as long.
    """
    for tenant in dict.fromkeys(entry.tenant for entry in entries):
        activate_tenant(tx, tenant)
    outage = "outages" in counters
    rows, notes = [], []
    for entry in entries:
        pause_s = min(2.0 ** min(entry.outages - 1, 10), MAX_PAUSE_S)
        begins = outage and entry.failing_since is None
        row: dict[str, object] = {
            "failing_since": tx.now if begins else entry.failing_since,
            "retry_at": tx.now + pause_s if outage and entry.outages else None,
            "avoid": entry.node if elsewhere else None,
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


def write_note(tx: Tx, session: str, text: str) -> None:
    """Store a note on a session; an empty one removes it. Raises `Missing`."""
    entry = get(tx, session)
    tx.update("sessions", session, note=text)
    result = tx.fetch_value("SELECT view FROM results WHERE session = :session", session=session)
    failure = decode_view(result).failure if result else None
    texts.replace(tx, entry.place, f"{text} {failure.message if failure else ''}")
    events.add(tx, protocol.EventKind.NOTED, events.Note(entry.task, session, entry.node))


def end_lease(tx: Tx, entry: SessionRow, status: Status, **columns: object) -> None:
    """Take a session from its node, if it has one; sets `columns`, too."""
    free = {"node": None, "stop": None, "stop_by": "", "stop_at": None}
    tx.update("sessions", entry.id, status=status.value, updated=tx.now, **free, **columns)


def end_pauses(tx: Tx) -> None:
    """Let those be leased again whose pause after an outage is over."""
    if tx.run("UPDATE sessions SET retry_at = NULL WHERE retry_at <= :now", now=tx.now):
        tx.notify("work")


def stop(tx: Tx, entries: Sequence[SessionRow], reason: protocol.StopKind, by: str) -> None:
    """Ask the nodes of these leased sessions to stop them."""
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
    """Record the stage that a node reports; an earlier stage than the recorded one is ignored."""
    if reported.status in STAGES and STAGES.index(reported.status) > STAGES.index(entry.status):
        tx.update("sessions", entry.id, status=reported.status.value, updated=tx.now)


# --------------------------------------------------------------------------- the queue
def list_waiting(tx: Tx) -> list[Row]:
    """Tenants with queued sessions: ``(name, pass)``."""
    # With EXISTS, PostgreSQL would join, and look through all that is queued.
    return tx.all(
        "SELECT name, pass FROM tenants WHERE (SELECT 1 FROM sessions"
        " WHERE sessions.tenant = tenants.name AND sessions.status = 'queued' LIMIT 1) = 1"
    )


def activate_tenant(tx: Tx, tenant: str) -> None:
    """Prepare a tenant for new work: if it had none, it starts level with those that have."""
    tx.run(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, 1, 0) ON CONFLICT DO NOTHING",
        name=tenant,
    )
    passes: dict[str, float] = dict(list_waiting(tx))
    if tenant in passes:
        return
    # Where nobody has work, level with whoever was given most.
    level = min(passes.values(), default=tx.fetch_value("SELECT MAX(pass) FROM tenants"))
    tx.run(
        "UPDATE tenants SET pass = :level WHERE name = :name AND pass < :level",
        name=tenant,
        level=level,
    )


def take_queued(tx: Tx, n: int, settings: ServerSettings) -> list[Row]:
    """The next `n` queued sessions, fairly: ``id task sample attempt epoch avoid home updated``.

    A tenant that may not have more for now is passed over, which earns it nothing either.
    """
    tenants, queues, heap, full = {}, {}, [], []
    # They are counted if one of these tenants has a limit, and once.
    leased = functools.cache(lambda: {name: int(n) for name, n in tx.all(_LEASED)})
    for name, at in list_waiting(tx):
        tenants[name] = tenant = settings.find_tenant(name)
        left = min(n, tenant.sessions - leased().get(name, 0)) if tenant.sessions else n
        queues[name] = iter(_read_queue(tx, name, max(0, left)))
        heap.append((at, name))
    heapq.heapify(heap)
    taken: list[Row] = []
    passes: dict[str, float] = {}
    while heap and len(taken) < n:
        at, name = heapq.heappop(heap)
        first = next(queues[name], None)
        if first is not None:
            taken.append(first)
            passes[name] = at + 1 / tenants[name].weight
            heapq.heappush(heap, (passes[name], name))
        elif tenants[name].sessions:
            full.append(name)
    passes |= dict.fromkeys(full, heap[0][0]) if heap else {}
    tx.many(
        "UPDATE tenants SET pass = :at WHERE name = :name",
        [{"name": name, "at": at} for name, at in passes.items()],
    )
    return taken


def _read_queue(tx: Tx, tenant: str, n: int) -> list[Row]:
    return tx.all(
        "SELECT s.id, s.task, s.sample, s.attempt, s.epoch, s.avoid, t.home, s.updated"
        " FROM sessions s JOIN tasks t ON t.id = s.task"
        " WHERE s.tenant = :tenant AND s.status = 'queued' AND s.retry_at IS NULL"
        " ORDER BY s.turn, s.place LIMIT :n",
        tenant=tenant,
        n=n,
    )
