"""Nodes: their leases, and the state that all of them share.

The lease is the node's, not the session's: a node that does not renew in time is gone, and its
sessions are given to others (see `leases.expire_node`).
"""

import hashlib

import msgspec

from tugline.errors import Conflict, FencedError
from tugline.protocol import Control, EventKind, NodeRegistration, NodeState, NodeView
from tugline.server.store import events
from tugline.server.store.base import Row, Tx, to_struct
from tugline.server.store.sessions import MAX_PAUSE_S

MAX_FAULTS = 3
"""Failures in a row that put a node in quarantine."""
BLOCK_S, MAX_BLOCK_S = 5.0, 300.0
"""The first and the longest time without work in a quarantine."""
_EXPIRED = 20
"""Nodes expired at once, so that those that live can renew meanwhile."""
_COLUMNS = "id, name, state, registration, registered, deadline, applied, fault"
_registration = msgspec.msgpack.Decoder(NodeRegistration)


def digest(token: str) -> str:
    """The stored form of a node's token."""
    return hashlib.sha256(token.encode()).hexdigest()


def add(tx: Tx, node: str, registration: NodeRegistration, token: str, *, lease_s: float) -> None:
    """Add a node."""
    tx.insert(
        "nodes",
        {
            "id": node,
            "name": registration.name,
            "token": digest(token),
            "registration": msgspec.msgpack.encode(registration),
            "state": NodeState.LIVE.value,
            "registered": tx.now,
            "deadline": tx.now + lease_s,
        },
    )
    joined = events.Note(node=node, detail={"name": registration.name, "slots": registration.slots})
    events.add(tx, EventKind.JOINED, joined)
    tx.notify("timers", "nodes")
    if registration.problem:
        _quarantine(tx, node, registration.problem)


def list_named(tx: Tx, name: str, instance: str = "") -> list[str]:
    """Nodes of this name that are not gone. Raises `Conflict` for one of another instance."""
    rows = tx.all(
        "SELECT id, registration, deadline FROM nodes WHERE name = :name AND state <> 'gone'",
        name=name,
    )
    for _, registration, deadline in rows:
        if _registration.decode(registration).instance != instance:
            msg = (
                f"a node named {name!r} is at work; give this one another name. If it was an"
                f" earlier process in another folder: its lease ends in {deadline - tx.now:.0f} s"
            )
            raise Conflict(msg, field="name")
    return [node for node, _, _ in rows]


def state(tx: Tx, node: str) -> NodeState:
    """Raises `FencedError` for one that is gone or was never here."""
    query = "SELECT state FROM nodes WHERE id = :node AND state <> 'gone'"
    lost = FencedError(f"node {node!r} was lost: what it held is given to others; register again")
    return NodeState(tx.require_one(query, lost, node=node)[0])


def renew(tx: Tx, node: str, applied: int, *, lease_s: float) -> None:
    """Extend its lease to `lease_s` from now, and record the applied generation."""
    tx.update("nodes", node, deadline=tx.now + lease_s, spared=0)
    if tx.run(
        "UPDATE nodes SET applied = :applied WHERE id = :node AND applied < :applied",
        node=node,
        applied=applied,
    ):
        tx.notify("applied")


def drain(tx: Tx, node: str) -> None:
    """Give it no more work. Raises `FencedError`."""
    if state(tx, node) is NodeState.LIVE:
        tx.update("nodes", node, state=NodeState.DRAINING.value)
        events.add(tx, EventKind.DRAINING, events.Note(node=node))
        tx.notify(f"node:{node}")


def mark_dead(tx: Tx, node: str, reason: str) -> None:
    """Mark it as gone."""
    tx.update("nodes", node, state=NodeState.GONE.value)
    events.add(tx, EventKind.LOST, events.Note(node=node, detail={"reason": reason}))
    tx.notify(f"node:{node}", "applied", "nodes")


def spare_all(tx: Tx, lease_s: float) -> None:
    """Spare nodes that could not renew: the server was away, not they.

    A node gets a lease, then half of one each time until it renews: restarts keep no dead node for
    ever. One that has 2/3 of a lease left, as all have beside a running server, needs nothing.
    Nothing that a clock ahead of the present one has set lasts longer than what begins now.
    """
    tx.run(
        "UPDATE nodes SET deadline = :now + :lease_s / (1 << spared), spared = spared + 1"
        " WHERE state <> 'gone' AND spared < 16 AND deadline < :now + :lease_s * 2 / 3"
        " AND deadline < :now + :lease_s / (1 << spared)",
        now=tx.now,
        lease_s=lease_s,
    )
    tx.run("UPDATE sessions SET stop_at = :now WHERE stop IS NOT NULL", now=tx.now)
    for table, column, longest_s in (
        ("nodes", "deadline", lease_s),
        ("nodes", "blocked_until", MAX_BLOCK_S),
        ("sessions", "retry_at", MAX_PAUSE_S),
    ):
        tx.run(
            f"UPDATE {table} SET {column} = :until WHERE {column} > :until",  # noqa: S608 - constants
            until=tx.now + longest_s,
        )


def list_expired(tx: Tx) -> list[str]:
    """Some of the nodes whose lease has run out, those first that are over for longest."""
    due = "SELECT id FROM nodes WHERE state <> 'gone' AND deadline < :now ORDER BY deadline"
    return tx.column(f"{due} LIMIT :limit", now=tx.now, limit=_EXPIRED)


def list_open(tx: Tx) -> dict[str, bool]:
    """Nodes that may be given work; True for one in quarantine that is to be tried."""
    rows = tx.all("SELECT id, fault FROM nodes WHERE state = 'live' AND blocked_until IS NULL")
    return {node: bool(fault) for node, fault in rows}


# --------------------------------------------------------------------------- quarantine
def note_fault(tx: Tx, node: str, task: str, reason: str) -> None:
    """Count a failure of the node; after `MAX_FAULTS` in a row it gets no work for a while.

    One task that fails everywhere must not stop all nodes: repetitions of a task do not count. What
    fails while the node is blocked was leased before, or is its trial, and counted already.
    """
    faults = tx.fetch_value(
        "UPDATE nodes SET faults = faults + 1, failed_task = :task"
        " WHERE id = :node AND blocked_until IS NULL AND failed_task <> :task RETURNING faults",
        node=node,
        task=task,
    )
    if faults is not None and faults >= MAX_FAULTS:
        _quarantine(tx, node, reason)


def _quarantine(tx: Tx, node: str, reason: str) -> None:
    tx.update("nodes", node, fault=reason[:500], faults=MAX_FAULTS)
    events.add(tx, EventKind.BLOCKED, events.Note(node=node, detail={"reason": reason[:500]}))
    block(tx, node)


def block(tx: Tx, node: str) -> None:
    """Give it no work for a while, twice as long each time.

    Then it gets one session and is blocked again, until that has shown that it works.
    """
    faults = tx.fetch_value("SELECT faults FROM nodes WHERE id = :node", node=node)
    until = tx.now + min(BLOCK_S * 2.0 ** (faults - MAX_FAULTS), MAX_BLOCK_S)
    tx.update("nodes", node, faults=min(faults + 1, 2 * MAX_FAULTS + 10), blocked_until=until)
    tx.notify("timers")


def note_success(tx: Tx, node: str) -> None:
    """End its quarantine, and forget its failures."""
    if tx.run(
        "UPDATE nodes SET faults = 0, fault = '', failed_task = '', blocked_until = NULL"
        " WHERE id = :node AND faults > 0",
        node=node,
    ):
        tx.notify("work")


def end_blocks(tx: Tx) -> None:
    """Let those be tried that were blocked for long enough."""
    if tx.run("UPDATE nodes SET blocked_until = NULL WHERE blocked_until <= :now", now=tx.now):
        tx.notify("work")


def bind_tokens(tx: Tx, join: str) -> None:
    """Revoke the tokens of nodes that joined by another join token than this one."""
    if tx.run("UPDATE control SET joined_by = :by WHERE joined_by <> :by", by=digest(join)):
        tx.run("UPDATE nodes SET token = ''")
        tx.notify("nodes")


def find_by_token(tx: Tx, token: str) -> str | None:
    """The node that a token was given to; None for an unknown one or a node that is gone."""
    query = "SELECT id FROM nodes WHERE state <> 'gone' AND token = :token"
    node: str | None = tx.fetch_value(query, token=digest(token))
    return node


def list_views(tx: Tx) -> list[NodeView]:
    """Nodes that are not gone, and those that went within the last day, by name."""
    running: dict[str, int] = dict(
        tx.all("SELECT node, COUNT(*) FROM sessions WHERE node IS NOT NULL GROUP BY node")
    )
    rows = tx.all(f"SELECT {_COLUMNS} FROM nodes ORDER BY name, registered")  # noqa: S608 - constants
    return [_view(row, running.get(row[0], 0)) for row in rows]


def trim(tx: Tx, before: float) -> None:
    """Delete nodes that were lost before that time."""
    tx.run("DELETE FROM nodes WHERE state = 'gone' AND deadline < :before", before=before)


def live_slots(tx: Tx) -> tuple[int, int]:
    """How many live nodes there are, and the sum of their slots."""
    live = tx.column("SELECT registration FROM nodes WHERE state = 'live'")
    return len(live), sum(_registration.decode(packed).slots for packed in live)


# --------------------------------------------------------------------------- shared state
def control(tx: Tx) -> Control:
    """The state that all nodes apply."""
    columns = "generation, paused, version"
    [row] = tx.all(f"SELECT {columns} FROM control")  # noqa: S608 - constants
    return to_struct(Control, columns, row)


def set_control(tx: Tx, new: Control) -> None:
    """Replace the shared state; all nodes are notified."""
    tx.run(
        "UPDATE control SET generation = :generation, paused = :paused, version = :version",
        generation=new.generation,
        paused=new.paused.value if new.paused else None,
        version=new.version,
    )
    tx.notify("control")


def list_applied(tx: Tx, generation: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the nodes that have applied this generation, and of those that have not."""
    rows = tx.all("SELECT name, applied FROM nodes WHERE state <> 'gone' ORDER BY name")
    return (
        tuple(name for name, at in rows if at >= generation),
        tuple(name for name, at in rows if at < generation),
    )


def _view(row: Row, running: int) -> NodeView:
    known = msgspec.structs.asdict(_registration.decode(row[3]))
    return to_struct(NodeView, _COLUMNS, row, running=running, **known)
