"""Sessions on their way to nodes and back: given out fairly, fenced by epoch, never lost (I3).

A node that answers has told what it holds, so what the table says it has and it does not know of
was in an answer that got lost: it is given again. What it holds and the table does not say is
somebody else's by now: it is told to drop it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tugline.protocol import (
    CommitOutcome,
    Control,
    EventKind,
    HeldSession,
    NodeRegistered,
    NodeRegistration,
    NodeState,
    Release,
    Stop,
    StopKind,
)
from tugline.server.store import events, nodes, results, sessions, tenants
from tugline.server.store.base import Tx
from tugline.server.store.groups import CANCELLED, End, finish
from tugline.server.store.sessions import Entry
from tugline.types import HANDLING, RETRIES, Cause, Failure, Session, Status


class Heard(NamedTuple):
    """What a node is to be told, whatever else there is."""

    again: tuple[Session, ...]
    """Given to it before, in an answer that it did not get."""
    stop: tuple[Stop, ...]
    control: Control
    draining: bool


# --------------------------------------------------------------------------- to a node
def join(tx: Tx, hello: NodeRegistration, now: float, lease_s: float) -> NodeRegistered:
    """Take a node in. Another of its name is given up, with what it holds."""
    node, token = f"{hello.name}.{secrets.token_hex(4)}", secrets.token_urlsafe(24)
    for before in nodes.named(tx, hello.name):
        lose(tx, before, "another of its name came", now)
    nodes.add(tx, node, hello, token, now=now, lease_s=lease_s)
    return NodeRegistered(node=node, token=token, lease_s=lease_s, control=nodes.control(tx))


def hear(tx: Tx, node: str, held: Sequence[HeldSession], advance_at: float | None = None) -> Heard:
    """Compare what a node holds with what the table says. Raises `FencedError` for a lost node.

    With `advance_at`, the time, the stages it tells of are noted; without, nothing is written.
    """
    draining = nodes.state(tx, node) is NodeState.DRAINING
    entries = {entry.id: entry for entry in sessions.select(tx, "node = :node", node=node)}
    stop = []
    for said in held:
        entry = entries.pop(said.session, None)
        if entry is None or entry.epoch != said.epoch:
            stop.append(Stop(said.session, said.epoch, StopKind.FENCED))
            continue
        if advance_at is not None:
            sessions.advance(tx, entry, said, advance_at)
        if entry.stop is not None:
            stop.append(Stop(said.session, said.epoch, StopKind(entry.stop), entry.stop_by))
    again = tuple(_session(entry) for entry in entries.values())
    return Heard(again, tuple(stop), nodes.control(tx), draining)


def give(tx: Tx, capacities: Mapping[str, int], now: float) -> dict[str, list[Session]]:
    """Give queued sessions to nodes that wait for some, at most as many as each has capacity for.

    Samples of a task go where its first one went as long as there is capacity, and an attempt that
    follows a failure goes elsewhere if anybody else has capacity.
    """
    if not tenants.waiting(tx):
        return {}
    live = nodes.live(tx)
    left = {
        node: capacity for node, capacity in capacities.items() if node in live and capacity > 0
    }
    given: dict[str, list[Session]] = {node: [] for node in left}
    homes: dict[str, str] = {}
    leased, notes = [], []
    version = nodes.control(tx).version
    for row in tenants.take(tx, sum(left.values())):
        session, task, sample, attempt, epoch, avoid, home, since = row
        home = homes.get(task, home)
        node = _place(left, home, avoid)
        left[node] -= 1
        if home not in live:
            homes[task] = node
        given[node].append(
            Session(
                id=session,
                task=task,
                sample=sample,
                attempt=attempt,
                epoch=epoch + 1,
                status=Status.INIT,
            )
        )
        leased.append({"id": session, "node": node, "version": version, "now": now})
        detail = {"attempt": attempt, "epoch": epoch + 1, "waited": max(0.0, now - since)}
        notes.append(events.Note(task, session, node, detail))
    if leased:
        _lease(tx, leased, homes)
        events.add_all(tx, EventKind.LEASED, notes)
    return {node: mine for node, mine in given.items() if mine}


def _place(left: Mapping[str, int], home: str | None, avoid: str | None) -> str:
    free = [node for node, capacity in left.items() if capacity > 0]
    elsewhere = [node for node in free if node != avoid] or free
    return home if home in elsewhere else max(elsewhere, key=lambda node: left[node])


def _lease(tx: Tx, leased: list[dict[str, object]], homes: Mapping[str, str]) -> None:
    tx.many(
        "UPDATE sessions SET status = 'init', epoch = epoch + 1, node = :node, version = :version,"
        " updated = :now WHERE id = :id",
        leased,
    )
    tx.many(
        "UPDATE tasks SET home = :home WHERE id = :task",
        [{"task": task, "home": home} for task, home in homes.items()],
    )


def _session(entry: Entry) -> Session:
    return Session(
        id=entry.id,
        task=entry.task,
        sample=entry.sample,
        attempt=entry.attempt,
        epoch=entry.epoch,
        status=Status(entry.status),
    )


# --------------------------------------------------------------------------- and back
def commit(tx: Tx, session: str, epoch: int, end: End, now: float) -> CommitOutcome:
    """Keep a result, once; the same result again is fine, whatever its epoch.

    Raises `FencedError` for a lost lease.
    """
    if results.digest_of(tx, session) == end.digest:
        return CommitOutcome.ALREADY
    entry = sessions.held(tx, session, epoch)
    if end.failure is not None and retry(tx, entry, end.failure, now):
        return CommitOutcome.REQUEUED
    finish(tx, entry, end, now)
    return CommitOutcome.COMMITTED


def release(tx: Tx, session: str, back: Release, now: float) -> None:
    """Give a session back to the line. Raises `FencedError` for a lost lease."""
    entry = sessions.held(tx, session, back.epoch)
    if entry.stop == StopKind.CANCELLED:
        finish(tx, entry, CANCELLED, now)
    elif entry.stop == StopKind.STALE:
        sessions.requeue(tx, entry, f"stale: {entry.stop_by}", now)
    elif back.boundary is None:
        sessions.requeue(tx, entry, back.reason, now, tries=0)
    else:
        give_up(tx, entry, Failure(back.boundary, back.reason), now)


def give_up(tx: Tx, entry: Entry, failure: Failure, now: float) -> None:
    """A leased session failed without a result: once more, or that was it."""
    if entry.stop == StopKind.CANCELLED:
        finish(tx, entry, CANCELLED, now)
    elif not retry(tx, entry, failure, now):
        said = f"{failure.message} (attempt {entry.attempt + 1}, the last)"
        finish(tx, entry, End(Status.FAILED, Failure(failure.boundary, said, failure.cause)), now)


def retry(tx: Tx, entry: Entry, failure: Failure, now: float) -> bool:
    """Requeue after a failure that is tried again; False if it is not (`HANDLING`)."""
    if entry.stop == StopKind.CANCELLED:
        return False
    handling = HANDLING[failure.cause] if failure.cause else None
    allowed = handling.retries if handling else RETRIES[failure.boundary]
    if not (more(tx, entry) if allowed is None else entry.faults < allowed):
        return False
    sessions.requeue(
        tx,
        entry,
        f"{failure.boundary}: {failure.message}",
        now,
        faults=0 if allowed is None else 1,
        elsewhere=handling is None or handling.elsewhere,
    )
    return True


def more(tx: Tx, entry: Entry) -> bool:
    """Whether its task allows it another attempt; those that a harness lost are not counted."""
    [(attempts,)] = tx.all("SELECT attempts FROM tasks WHERE id = :task", task=entry.task)
    return bool(entry.attempt - entry.faults + 1 < attempts)


def lose(tx: Tx, node: str, reason: str, now: float) -> None:
    """A node is gone: what it held is given up, and nothing it says from now on counts."""
    nodes.bury(tx, node, reason)
    said = f"node {node} was lost: {reason}"
    failure = Failure(HANDLING[Cause.NODE].boundary, said, Cause.NODE)
    for entry in sessions.select(tx, "node = :node ORDER BY place", node=node):
        give_up(tx, entry, failure, now)


def overdue(tx: Tx, before: float, now: float) -> None:
    """End sessions that were asked to stop before that time, and did not."""
    for entry in sessions.select(tx, "stop IS NOT NULL AND stop_at < :before", before=before):
        if entry.stop == StopKind.CANCELLED:
            finish(tx, entry, CANCELLED, now)
        else:
            sessions.requeue(tx, entry, f"stale: {entry.stop_by}", now)


def abort_stale(tx: Tx, version: int, now: float) -> None:
    """Ask sessions that are too many versions behind to start again, if they have attempts left."""
    behind = sessions.select(
        tx,
        "node IS NOT NULL AND stop IS NULL AND task IN (SELECT id FROM tasks WHERE released IS NULL"
        " AND on_stale = 'abort' AND max_staleness < :version - sessions.version)",
        version=version,
    )
    stale = [entry for entry in behind if more(tx, entry)]
    sessions.stop(tx, stale, StopKind.STALE, f"weights {version}", now)
