"""Rows of sessions: how they are found, and how one goes back into the line.

`held` is the fence: whatever a node says about a session counts only with the epoch of a lease that
still holds (I3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tugline.errors import FencedError, Invalid, Missing
from tugline.protocol import EventKind, HeldSession, Page, SessionView, StopKind
from tugline.server.store import events, tenants
from tugline.server.store.base import Tx
from tugline.types import TERMINAL, Status

STAGES = (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
"""Where a leased session may be, in order."""
_COLUMNS = (
    "id, place, task, tenant, sample, attempt, faults, epoch, status, node, version, stop, stop_by,"
    " created, updated"
)


class Entry(NamedTuple):
    """A session as it stands in its row."""

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
        """Whether a node has it."""
        return self.status in STAGES

    def view(self) -> SessionView:
        """As the API shows it."""
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


def get(tx: Tx, session: str) -> Entry:
    """One session. Raises `Missing`."""
    found = select(tx, "id = :session", session=session)
    if not found:
        msg = f"no session {session!r}"
        raise Missing(msg)
    return found[0]


def held(tx: Tx, session: str, epoch: int) -> Entry:
    """One session, if `epoch` is that of a lease which still holds. Raises `FencedError`."""
    entry = get(tx, session)
    if entry.epoch != epoch or not entry.leased:
        msg = (
            f"session {session} is {entry.status} at epoch {entry.epoch};"
            f" the lease of epoch {epoch} is lost"
        )
        raise FencedError(msg)
    return entry


def select(tx: Tx, where: str, **values: object) -> list[Entry]:
    """Sessions for which `where` holds, which is SQL of ours."""
    return [
        Entry(*row)
        for row in tx.all(f"SELECT {_COLUMNS} FROM sessions WHERE {where}", **values)  # noqa: S608 - constants
    ]


def page(
    tx: Tx,
    *,
    task: str | None,
    status: Status | None,
    node: str | None,
    after: str | None,
    limit: int,
) -> Page:
    """Sessions in order of submission."""
    values: dict[str, object] = {"after": cursor(after), "limit": limit + 1}
    where = "place > :after"
    for column, wanted in (("task", task), ("status", status), ("node", node)):
        if wanted is not None:
            values[column] = str(wanted)
            where += f" AND {column} = :{column}"
    found = select(tx, f"{where} ORDER BY place LIMIT :limit", **values)
    more = str(found[limit - 1].place) if len(found) > limit else None
    return Page(sessions=tuple(entry.view() for entry in found[:limit]), next=more)


def cursor(after: str | None) -> int:
    """The place that a list goes on after. Raises `Invalid`."""
    if after is None:
        return -1
    if not (after.isascii() and after.isdigit() and len(after) < 19):
        msg = f"after is {after!r}, must be the `next` of an earlier page"
        raise Invalid(msg, field="after")
    return int(after)


def requeue(  # noqa: PLR0913 - what is known of it
    tx: Tx,
    entry: Entry,
    reason: str,
    now: float,
    *,
    tries: int = 1,
    faults: int = 0,
    elsewhere: bool = False,
) -> None:
    """Put a leased session back at its place in the line; it has had `tries` more attempts.

    With `elsewhere` another node gets it, if there is one with room.
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
        now=now,
    )
    detail: dict[str, str | int | float] = {"reason": reason, "attempt": entry.attempt + tries}
    events.add(
        tx, EventKind.REQUEUED, task=entry.task, session=entry.id, node=entry.node, detail=detail
    )
    tx.wake("work")


def stop(tx: Tx, entries: Sequence[Entry], reason: StopKind, by: str, now: float) -> None:
    """Ask the nodes of these leased sessions to stop them."""
    tx.many(
        "UPDATE sessions SET stop = :reason, stop_by = :by, stop_at = :now WHERE id = :id",
        [{"id": entry.id, "reason": reason.value, "by": by, "now": now} for entry in entries],
    )
    detail = {"reason": reason.value, "by": by}
    stopping = [events.Note(entry.task, entry.id, entry.node, detail) for entry in entries]
    if stopping:
        events.add_all(tx, EventKind.STOPPING, stopping)
    tx.wake("timers", *(f"node:{entry.node}" for entry in entries))


def advance(tx: Tx, entry: Entry, said: HeldSession, now: float) -> None:
    """Note the stage that a node says its session is in. Stages are never gone back."""
    if said.status in STAGES and STAGES.index(said.status) > STAGES.index(Status(entry.status)):
        tx.run(
            "UPDATE sessions SET status = :status, updated = :now WHERE id = :id",
            id=entry.id,
            status=said.status.value,
            now=now,
        )


def tally(tx: Tx) -> dict[str, int]:
    """Sessions by status. Counted as they come and end, so that nothing is looked through."""
    at: dict[str, int] = dict(tx.all("SELECT name, at FROM positions"))
    counts: dict[str, int] = {status.value: at[status.value] for status in TERMINAL}
    counts |= Counter(
        status for (status,) in tx.all("SELECT status FROM sessions WHERE node IS NOT NULL")
    )
    counts[Status.QUEUED.value] = at["sessions"] - sum(counts.values())
    return {name: n for name, n in counts.items() if n}
