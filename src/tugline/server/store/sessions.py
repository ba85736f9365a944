"""Sessions: their queue, their stages, and the return to the queue.

`get_leased` is the fence: a message of a node about a session counts only with the epoch of its
present lease (I3).

The queue is fair by stride scheduling over tenants. A tenant's `pass` grows by ``1 / weight`` with
each session leased, and the lowest pass is served first, so tenants with work share the nodes by
their weights at any load. A tenant that gets work again starts level with the others: time without
work earns nothing.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tugline.errors import FencedError, Missing
from tugline.protocol import EventKind, HeldSession, Page, SessionView, StopKind
from tugline.server.store import events
from tugline.server.store.base import Row, Tx, parse_cursor
from tugline.types import Session, Status

STAGES = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
"""Stages of a leased session, in order."""
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

    @property
    def leased(self) -> bool:
        """Whether a node holds it."""
        return self.status in STAGES

    def view(self) -> SessionView:
        """Its state as the API shows it."""
        return msgspec.convert({**self._asdict(), "stopping": self.stop_by}, SessionView)

    def session(self) -> Session:
        """The session as its node gets it."""
        return msgspec.convert(self._asdict(), Session)


_COLUMNS = ", ".join(SessionRow._fields)


def get(tx: Tx, session: str) -> SessionRow:
    """One session. Raises `Missing`."""
    found = select(tx, "id = :session", session=session)
    if not found:
        msg = f"no session {session!r}"
        raise Missing(msg)
    return found[0]


def get_view(tx: Tx, session: str) -> SessionView:
    """Current state of a session. Raises `Missing`."""
    return get(tx, session).view()


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


def page(
    tx: Tx,
    *,
    task: str | None = None,
    status: Status | None = None,
    node: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> Page:
    """Sessions in order of submission."""
    values: dict[str, object] = {"after": parse_cursor(after), "limit": limit + 1}
    where = "place > :after"
    for column, wanted in (("task", task), ("status", status), ("node", node)):
        if wanted is not None:
            values[column] = str(wanted)
            where += f" AND {column} = :{column}"
    found = select(tx, f"{where} ORDER BY place LIMIT :limit", **values)
    more = str(found[limit - 1].place) if len(found) > limit else None
    return Page(sessions=tuple(entry.view() for entry in found[:limit]), next=more)


def requeue(
    tx: Tx,
    entry: SessionRow,
    reason: str,
    counters: Sequence[str] = ("attempt",),
    *,
    elsewhere: bool = False,
) -> None:
    """Put a leased session back at its place in the line; `counters` are raised by one.

    With `elsewhere` another node gets it, if one has capacity. From its second outage on it waits
    before it is leased again, each time twice as long.
    """
    activate_tenant(tx, entry.tenant)
    outage = "outages" in counters
    pause_s = min(2.0 ** min(entry.outages - 1, 10), MAX_PAUSE_S)
    raised = "".join(f"{name} = {name} + 1, " for name in counters)
    tx.run(
        f"UPDATE sessions SET {raised} status = 'queued', failing_since = :since,"  # noqa: S608 - constants
        " retry_at = :retry_at, avoid = :avoid, node = NULL,"
        " stop = NULL, stop_by = '', stop_at = NULL, updated = :now WHERE id = :id",
        id=entry.id,
        since=tx.now if outage and entry.failing_since is None else entry.failing_since,
        retry_at=tx.now + pause_s if outage and entry.outages else None,
        avoid=entry.node if elsewhere else None,
        now=tx.now,
    )
    attempt = entry.attempt + ("attempt" in counters)
    detail: dict[str, str | int | float] = {"reason": reason, "attempt": attempt}
    events.add(
        tx, EventKind.REQUEUED, task=entry.task, session=entry.id, node=entry.node, detail=detail
    )
    tx.notify("work", "timers")


def end_pauses(tx: Tx) -> None:
    """Let those be leased again whose pause after an outage is over."""
    if tx.run("UPDATE sessions SET retry_at = NULL WHERE retry_at <= :now", now=tx.now):
        tx.notify("work")


def stop(tx: Tx, entries: Sequence[SessionRow], reason: StopKind, by: str) -> None:
    """Ask the nodes of these leased sessions to stop them."""
    tx.many(
        "UPDATE sessions SET stop = :reason, stop_by = :by, stop_at = :now WHERE id = :id",
        [{"id": entry.id, "reason": reason.value, "by": by, "now": tx.now} for entry in entries],
    )
    detail = {"reason": reason.value, "by": by}
    stopping = [events.Note(entry.task, entry.id, entry.node, detail) for entry in entries]
    if stopping:
        events.add_all(tx, EventKind.STOPPING, stopping)
    tx.notify("timers", *(f"node:{entry.node}" for entry in entries))


def advance(tx: Tx, entry: SessionRow, reported: HeldSession) -> None:
    """Record the stage that a node reports; an earlier stage than the recorded one is ignored."""
    if reported.status in STAGES and STAGES.index(reported.status) > STAGES.index(
        Status(entry.status)
    ):
        tx.run(
            "UPDATE sessions SET status = :status, updated = :now WHERE id = :id",
            id=entry.id,
            status=reported.status.value,
            now=tx.now,
        )


# --------------------------------------------------------------------------- the queue
def set_weights(tx: Tx, weights: Mapping[str, float]) -> None:
    """Set the weights of these tenants, and 1 for all others."""
    tx.run("UPDATE tenants SET weight = 1")
    tx.many(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, :weight, 0)"
        " ON CONFLICT (name) DO UPDATE SET weight = excluded.weight",
        [{"name": name, "weight": weight} for name, weight in weights.items()],
    )


def list_waiting(tx: Tx) -> list[Row]:
    """Tenants with queued sessions: ``(name, weight, pass)``."""
    # With EXISTS, PostgreSQL would join, and look through all that is queued.
    return tx.all(
        "SELECT name, weight, pass FROM tenants WHERE (SELECT 1 FROM sessions"
        " WHERE sessions.tenant = tenants.name AND sessions.status = 'queued' LIMIT 1) = 1"
    )


def activate_tenant(tx: Tx, tenant: str) -> None:
    """Prepare a tenant for new work: if it had none, it starts level with those that have."""
    tx.run(
        "INSERT INTO tenants (name, weight, pass) VALUES (:name, 1, 0) ON CONFLICT DO NOTHING",
        name=tenant,
    )
    passes = {name: at for name, _, at in list_waiting(tx)}
    if tenant in passes:
        return
    # Where nobody has work, level with whoever was given most.
    [(most,)] = tx.all("SELECT MAX(pass) FROM tenants")
    level = min(passes.values(), default=most)
    tx.run(
        "UPDATE tenants SET pass = :level WHERE name = :name AND pass < :level",
        name=tenant,
        level=level,
    )


def take_queued(tx: Tx, n: int) -> list[Row]:
    """The next `n` queued sessions, fairly: ``id task sample attempt epoch avoid home updated``."""
    weights, queues, heap = {}, {}, []
    for name, weight, at in list_waiting(tx):
        weights[name], queues[name] = weight, iter(_read_queue(tx, name, n))
        heap.append((at, name))
    heapq.heapify(heap)
    taken: list[Row] = []
    passes: dict[str, float] = {}
    while heap and len(taken) < n:
        at, name = heapq.heappop(heap)
        first = next(queues[name], None)
        if first is not None:
            taken.append(first)
            passes[name] = at + 1 / weights[name]
            heapq.heappush(heap, (passes[name], name))
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
