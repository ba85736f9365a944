"""Sessions: reading, stages, and the return to the queue.

`get_leased` is the fence: a message of a node about a session counts only with the epoch of its
present lease (I3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tugline.errors import FencedError, Missing
from tugline.protocol import EventKind, HeldSession, Page, SessionView, StopKind
from tugline.server.store import events, tenants
from tugline.server.store.base import Tx
from tugline.server.store.tasks import parse_cursor
from tugline.types import TERMINAL, Status

STAGES = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
"""Stages of a leased session, in order."""
_COLUMNS = (
    "id, place, task, tenant, sample, attempt, faults, epoch, status, node, version, stop, stop_by,"
    " created, updated"
)


class SessionRow(NamedTuple):
    """A session's row."""

    id: str
    place: int
    task: str
    tenant: str
    sample: int
    attempt: int
    faults: int
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
        return SessionView(
            id=self.id,
            task=self.task,
            sample=self.sample,
            attempt=self.attempt,
            epoch=self.epoch,
            status=Status(self.status),
            node=self.node,
            version=self.version,
            created=self.created,
            updated=self.updated,
            stopping=self.stop_by,
        )


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
        msg = (
            f"session {session} is {entry.status} at epoch {entry.epoch};"
            f" the lease of epoch {epoch} is lost"
        )
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
    *,
    tries: int = 1,
    faults: int = 0,
    elsewhere: bool = False,
) -> None:
    """Put a leased session back at its place in the line; it has had `tries` more attempts.

    With `elsewhere` another node gets it, if one has capacity.
    """
    tenants.activate(tx, entry.tenant)
    tx.run(
        "UPDATE sessions SET status = 'queued', attempt = attempt + :tries,"
        " faults = faults + :faults, avoid = :avoid, node = NULL,"
        " stop = NULL, stop_by = '', stop_at = NULL, updated = :now WHERE id = :id",
        id=entry.id,
        tries=tries,
        faults=faults,
        avoid=entry.node if elsewhere else None,
        now=tx.now,
    )
    detail: dict[str, str | int | float] = {"reason": reason, "attempt": entry.attempt + tries}
    events.add(
        tx, EventKind.REQUEUED, task=entry.task, session=entry.id, node=entry.node, detail=detail
    )
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


def count_by_status(tx: Tx) -> dict[str, int]:
    """Sessions by status, from counters: finished sessions are not scanned."""
    at: dict[str, int] = dict(tx.all("SELECT name, at FROM positions"))
    counts: dict[str, int] = {status.value: at[status.value] for status in TERMINAL}
    counts |= Counter(
        status for (status,) in tx.all("SELECT status FROM sessions WHERE node IS NOT NULL")
    )
    counts[Status.QUEUED.value] = at["sessions"] - sum(counts.values())
    return {name: n for name, n in counts.items() if n}
