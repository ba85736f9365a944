"""Leases: sessions leased to nodes fairly, fenced by epoch, never lost (I3).

Every request of a node lists the sessions that it holds. A session that is leased to the node but
not listed was in a lost response: it is sent again. A listed session that is no longer leased to
the node belongs to another node: the node is told to stop it.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence

from tugline import protocol
from tugline.server.settings import DEFAULTS, ServerSettings
from tugline.server.store import events, nodes, queues, results, sessions, telemetry
from tugline.server.store.base import Tx
from tugline.server.store.queues import QueuedRow
from tugline.server.store.results import CANCELLED, End, finish
from tugline.server.store.sessions import SessionRow
from tugline.types import HANDLING, Cause, Failure, Session, Status
from tugline.types.session import UNKNOWN_CAUSE

_GRANT_BATCH = 2000
"""Number of sessions leased per transaction, to keep it short."""
EPOCHS_FROM = 1_600_000_000
"""Unix time of epoch 0; a store's epochs exceed those of a store that it replaces."""


Granted = dict[str, list[Session]]
"""Leased sessions by node."""
Orders = tuple[tuple[Session, ...], protocol.LeaseResponse]
"""Sessions leased in a response that the node did not receive, and a response without work."""


# --------------------------------------------------------------------------- granting
def register(
    tx: Tx, registration: protocol.NodeRegistration, lease_s: float
) -> protocol.NodeRegistered:
    """Add a node. An earlier process of it expires, with its leases. Raises `Conflict`."""
    node = f"{registration.name}.{secrets.token_hex(4)}"
    token = secrets.token_urlsafe(24)
    for before in nodes.list_named(tx, registration.name, registration.instance):
        expire_node(tx, before, "another process of this node has registered")
    nodes.add(tx, node, registration, token, lease_s=lease_s)
    return protocol.NodeRegistered(
        node=node, token=token, lease_s=lease_s, control=nodes.control(tx)
    )


def renew(tx: Tx, node: str, renewal: protocol.Renewal, *, lease_s: float) -> Orders:
    """Extend a node's lease, record the reported stages, problem and load, and reconcile.

    Raises `FencedError` for a lost node.
    """
    nodes.renew(tx, node, renewal.applied, lease_s=lease_s)
    if renewal.problem is not None:
        nodes.set_problem(tx, node, renewal.problem)
    if renewal.sample is not None:
        telemetry.add(tx, nodes.name_of(node), renewal.sample)
    return reconcile(tx, node, renewal.held, advance=True)


def reconcile(
    tx: Tx, node: str, held: Sequence[protocol.HeldSession], *, advance: bool = False
) -> Orders:
    """Compare the sessions that a node holds with its leases. Raises `FencedError` for a lost node.

    With `advance`, the reported stages are recorded; without, nothing is written.
    """
    draining = nodes.state(tx, node) is protocol.NodeState.DRAINING
    entries = {entry.id: entry for entry in sessions.select(tx, "node = :node", node=node)}
    stop = []
    for reported in held:
        session = reported.session
        epoch = reported.epoch
        entry = entries.pop(session, None)
        if entry is None or entry.epoch != epoch:
            stop.append(protocol.Stop(session, epoch, protocol.StopKind.FENCED))
            continue
        if advance:
            sessions.advance(tx, entry, reported)
        if entry.stop is not None:
            stop.append(protocol.Stop(session, epoch, protocol.StopKind(entry.stop), entry.stop_by))
    again = tuple(entry.session() for entry in entries.values())
    control = nodes.control(tx)
    return again, protocol.LeaseResponse(stop=tuple(stop), control=control, draining=draining)


def grant(tx: Tx, capacities: Mapping[str, int], settings: ServerSettings = DEFAULTS) -> Granted:
    """Lease queued sessions to waiting nodes, up to the nodes' capacity and the tenants' limits.

    Samples of a task go to the node of the first sample while it has capacity; an attempt after a
    failure goes to another node if there is one with capacity. A session that is pinned to a node
    waits for it.
    """
    waiting = queues.list_waiting(tx)
    if not waiting:
        return {}
    live = nodes.list_open(tx)
    pins = {tenant: list(queues.list_pins(tx, tenant)) for tenant, _ in waiting}
    if _retry_homeless(tx, pins, {nodes.name_of(node) for node in live}):
        waiting = queues.list_waiting(tx)
    left = {
        node: 1 if live[node] else capacity
        for node, capacity in capacities.items()
        if node in live and capacity > 0
    }
    homes: dict[str, str] = {}
    leased: list[tuple[QueuedRow, str]] = []
    named = {nodes.name_of(node): node for node in left}
    free = {name: left[node] for name, node in named.items()}
    count = min(sum(left.values()), _GRANT_BATCH)
    taken = queues.take_queued(tx, count, settings, waiting, pins, free)
    for row in sorted(taken, key=lambda row: not row.pinned):  # the others can go elsewhere
        home = homes.get(row.task, row.home)
        node = named[row.pinned] if row.pinned else _choose_node(left, home, row.avoid)
        left[node] -= 1
        if home not in live:
            homes[row.task] = node
        leased.append((row, node))
    granted = _record_leases(tx, leased) if leased else {}
    tx.many(
        "UPDATE tasks SET home = :home WHERE id = :task",
        [{"task": task, "home": home} for task, home in homes.items()],
    )
    if len(leased) == _GRANT_BATCH:
        tx.notify("work")
    for node in granted:
        if live[node]:
            nodes.block(tx, node)
    return granted


def _record_leases(tx: Tx, leased: Sequence[tuple[QueuedRow, str]]) -> Granted:
    """Lease each session to its node, with the next epoch."""
    granted: Granted = {}
    changes = []
    notes = []
    version = nodes.control(tx).version
    for row, node in leased:
        epoch = max(row.epoch + 1, int(tx.now) - EPOCHS_FROM)
        new = Session(
            id=row.id,
            task=row.task,
            sample=row.sample,
            attempt=row.attempt,
            epoch=epoch,
            status=Status.INIT,
        )
        granted.setdefault(node, []).append(new)
        waited_s = tx.count_since(row.updated)
        change = {"id": row.id, "epoch": epoch, "node": node, "version": version, "now": tx.now}
        changes.append({**change, "waited": waited_s})
        detail = {"attempt": row.attempt, "epoch": epoch, "waited": waited_s}
        notes.append(events.Note(row.task, row.id, node, detail))
    tx.many(
        "UPDATE sessions SET status = 'init', epoch = :epoch, node = :node, version = :version,"
        " updated = :now, leased_at = :now, queued_s = queued_s + :waited WHERE id = :id",
        changes,
    )
    events.add(tx, protocol.EventKind.LEASED, *notes)
    return granted


def _retry_homeless(tx: Tx, pins: Mapping[str, Sequence[str]], names: Collection[str]) -> bool:
    """Retry later, or end, queued sessions that are pinned to other nodes than `names`.

    `pins` are those of each tenant. Returns whether there was such a session.
    """
    where = (
        "tenant = :tenant AND status = 'queued' AND pinned = :pin AND retry_at IS NULL"
        " ORDER BY turn, place LIMIT :limit"
    )
    homeless = [
        (entry, pin)
        for tenant, pinned in pins.items()
        for pin in pinned
        if pin not in names
        for entry in sessions.select(tx, where, tenant=tenant, pin=pin, limit=_GRANT_BATCH)
    ]
    for entry, pin in homeless:
        msg = f"session {entry.judges!r} is recorded on node {pin!r}, which takes no work"
        give_up(tx, [entry], Failure(HANDLING[Cause.NODE].boundary, msg, Cause.NODE))
    return bool(homeless)


def _choose_node(left: Mapping[str, int], home: str | None, avoid: str | None) -> str:
    if home is not None and home != avoid and left.get(home, 0) > 0:
        return home
    free = [node for node, capacity in left.items() if capacity > 0]
    elsewhere = [node for node in free if node != avoid] or free
    return max(elsewhere, key=lambda node: left[node])


# --------------------------------------------------------------------------- results and retries
def find_lease(tx: Tx, session: str, epoch: int, digest: str) -> SessionRow | None:
    """Return the leased session of a result; None if the same result is already stored.

    Raises `FencedError` for a lost lease.
    """
    if results.read_digest(tx, session) == digest:
        return None
    return sessions.get_leased(tx, session, epoch)


def commit(tx: Tx, session: str, epoch: int, end: End) -> protocol.CommitOutcome:
    """Store a result, once. Raises `FencedError` for a lost lease."""
    entry = find_lease(tx, session, epoch, end.digest)
    if entry is None:
        return protocol.CommitOutcome.ALREADY
    if end.failure is not None and not retry(tx, [entry], end.failure):
        return protocol.CommitOutcome.REQUEUED
    finish(tx, entry, end)
    return protocol.CommitOutcome.COMMITTED


def release(tx: Tx, session: str, release: protocol.Release) -> None:
    """Return a session to the queue. Raises `FencedError` for a lost lease."""
    entry = sessions.get_leased(tx, session, release.epoch)
    if entry.stop is not None:
        _end_stopped(tx, entry)
    elif release.boundary is None:
        sessions.requeue(tx, [entry], release.reason, ())
    else:
        give_up(tx, [entry], Failure(release.boundary, release.reason))


def give_up(tx: Tx, entries: Sequence[SessionRow], failure: Failure) -> None:
    """Retry or end leased sessions that failed without a result."""
    for entry in retry(tx, entries, failure):
        if entry.stop == protocol.StopKind.CANCELLED:
            finish(tx, entry, CANCELLED)
        else:
            message = f"{failure.message} (after {entry.attempt + entry.outages + 1} attempts)"
            final = Failure(failure.boundary, message, failure.cause)
            finish(tx, entry, End(Status.FAILED, final))


def retry(tx: Tx, entries: Sequence[SessionRow], failure: Failure) -> list[SessionRow]:
    """Requeue sessions that may be retried after a failure (`HANDLING`); return the others."""
    handling = HANDLING[failure.cause] if failure.cause else UNKNOWN_CAUSE[failure.boundary]
    allowed = handling.retries
    limits = _read_retry_limits(tx, entries) if allowed is None else {}
    retried = [
        entry
        for entry in entries
        if entry.stop != protocol.StopKind.CANCELLED
        and (entry.faults < allowed if allowed is not None else _may_retry(tx, entry, limits))
    ]
    if retried:
        sessions.requeue(
            tx,
            retried,
            f"{failure.boundary}: {failure.message}",
            ("outages",) if allowed is None else ("attempt", "faults"),
            elsewhere=handling.elsewhere,
        )
    requeued = {entry.id for entry in retried}
    return [entry for entry in entries if entry.id not in requeued]


def _read_retry_limits(tx: Tx, entries: Sequence[SessionRow]) -> dict[str, tuple[int, float]]:
    """Return the allowed attempts, and seconds of retries, by task of `entries`."""
    ids = {entry.task for entry in entries}
    rows = tx.all("SELECT id, attempts, retry_s FROM tasks WHERE id IN :ids", ids=ids)
    return {task: (attempts, retry_s) for task, attempts, retry_s in rows}


def _may_retry(tx: Tx, entry: SessionRow, limits: Mapping[str, tuple[int, float]]) -> bool:
    """Whether a session is retried after an outage: up to `attempts` times or within `retry_s`."""
    attempts, retry_s = limits[entry.task]
    failing_s = 0.0 if entry.failing_since is None else tx.now - entry.failing_since
    return entry.outages + 1 < attempts or failing_s < retry_s


def expire_node(tx: Tx, node: str, reason: str) -> None:
    """Mark a node as lost: its sessions are retried, its messages are rejected."""
    nodes.mark_dead(tx, node, reason)
    message = f"node {node} was lost: {reason}"
    failure = Failure(HANDLING[Cause.NODE].boundary, message, Cause.NODE)
    give_up(tx, sessions.select(tx, "node = :node ORDER BY place", node=node), failure)


def end_unstopped(tx: Tx, before: float) -> None:
    """End sessions whose stop was requested before that time and that have not stopped."""
    for entry in sessions.select(tx, "stop IS NOT NULL AND stop_at < :before", before=before):
        _end_stopped(tx, entry)


def _end_stopped(tx: Tx, entry: SessionRow) -> None:
    if entry.stop == protocol.StopKind.CANCELLED:
        finish(tx, entry, CANCELLED)
    else:
        sessions.requeue(tx, [entry], f"stale: {entry.stop_by}")


def abort_stale(tx: Tx, version: int) -> None:
    """Restart sessions with stale weights that have attempts left."""
    behind = sessions.select(
        tx,
        "node IS NOT NULL AND stop IS NULL AND task IN (SELECT id FROM tasks WHERE released IS NULL"
        " AND on_stale = 'abort' AND max_staleness < :version - sessions.version)",
        version=version,
    )
    limits = _read_retry_limits(tx, behind)  # failures are not counted
    stale = [row for row in behind if row.attempt - row.faults + 1 < limits[row.task][0]]
    sessions.stop(tx, stale, protocol.StopKind.STALE, f"weights {version}")
