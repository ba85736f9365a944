"""Nodes, their leases, and the state shared by all nodes.

A lease belongs to a node, not to a session: a node that does not renew in time is gone, and its
sessions are given to other nodes (see `leases.expire_node`).
"""

import hashlib

import msgspec

from tugline.errors import Conflict, FencedError
from tugline.protocol import Control, EventKind, NodeRegistration, NodeState, NodeView
from tugline.server.store import events
from tugline.server.store.base import Row, Tx, to_struct
from tugline.server.store.sessions import MAX_PAUSE_S

BLOCK_S = 5.0
"""First pause, in seconds, of a node in quarantine."""
MAX_BLOCK_S = 300.0
"""Its longest pause."""
_MAX_DOUBLINGS = 10
_EXPIRE_BATCH = 20
"""Number of nodes expired per transaction, so that live nodes can renew in between."""
_COLUMNS = "id, name, state, registration, registered, deadline, applied, fault"
_registration = msgspec.msgpack.Decoder(NodeRegistration)


def digest(token: str) -> str:
    """Return the digest of a node's token, in which it is stored."""
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
    """List nodes of this name that are not gone. Raises `Conflict` for one of another instance."""
    rows = tx.all(
        "SELECT id, registration, deadline FROM nodes WHERE name = :name AND state <> 'gone'",
        name=name,
    )
    for _, registration, deadline in rows:
        if _registration.decode(registration).instance != instance:
            msg = (
                f"a node named {name!r} is already active; give this node another name. If the "
                "active one was an"
                f" earlier process in another folder, its lease ends in {deadline - tx.now:.0f} s"
            )
            raise Conflict(msg, field="name")
    return [node for node, _, _ in rows]


def name_of(node: str) -> str:
    """Return the name of a node, which its processes have in common, from an id."""
    return node.rpartition(".")[0]


def state(tx: Tx, node: str) -> NodeState:
    """Return the state of a node. Raises `FencedError` if it is gone or unknown."""
    query = "SELECT state FROM nodes WHERE id = :node AND state <> 'gone'"
    lost = FencedError(
        f"node {node!r} was lost, and its sessions go to other nodes; register again"
    )
    return NodeState(tx.require_one(query, lost, node=node)[0])


def renew(tx: Tx, node: str, applied: int, *, lease_s: float) -> None:
    """Extend a node's lease to `lease_s` from now, and record the applied generation."""
    tx.update("nodes", node, deadline=tx.now + lease_s, spared=0)
    if tx.run(
        "UPDATE nodes SET applied = :applied WHERE id = :node AND applied < :applied",
        node=node,
        applied=applied,
    ):
        tx.notify("applied")


def drain(tx: Tx, node: str) -> None:
    """Lease no more sessions to a node. Raises `FencedError`."""
    if state(tx, node) is NodeState.LIVE:
        tx.update("nodes", node, state=NodeState.DRAINING.value)
        events.add(tx, EventKind.DRAINING, events.Note(node=node))
        tx.notify(f"node:{node}")


def mark_dead(tx: Tx, node: str, reason: str) -> None:
    """Mark a node as gone."""
    tx.update("nodes", node, state=NodeState.GONE.value)
    events.add(tx, EventKind.LOST, events.Note(node=node, detail={"reason": reason}))
    tx.notify(f"node:{node}", "applied", "nodes")


def extend_leases(tx: Tx, lease_s: float) -> None:
    """Extend leases after a downtime of the server, in which nodes could not renew.

    A node gets `lease_s`, then half as much each time until it renews, so that restarts do not keep
    a dead node. Leases with 2/3 of `lease_s` left, as under a running server, are not extended.
    Times set by a clock that was ahead are cut to what would be set now.
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
    """List a batch of nodes whose lease has expired, earliest first."""
    due = "SELECT id FROM nodes WHERE state <> 'gone' AND deadline < :now ORDER BY deadline"
    return tx.column(f"{due} LIMIT :limit", now=tx.now, limit=_EXPIRE_BATCH)


def list_open(tx: Tx) -> dict[str, bool]:
    """Return the nodes that may get sessions; True for a trial of a node in quarantine."""
    rows = tx.all("SELECT id, fault FROM nodes WHERE state = 'live' AND blocked_until IS NULL")
    return {node: bool(fault) for node, fault in rows}


# --------------------------------------------------------------------------- quarantine
def set_problem(tx: Tx, node: str, problem: str) -> None:
    """Put a node in quarantine for a problem that it reports; an empty one ends the quarantine.

    Only the node's own test decides, because a tenant can make its sessions fail in any way.
    """
    if not problem:
        _end_quarantine(tx, node)
    elif not tx.fetch_value("SELECT fault FROM nodes WHERE id = :node", node=node):
        _quarantine(tx, node, problem)


def _quarantine(tx: Tx, node: str, reason: str) -> None:
    tx.update("nodes", node, fault=reason[:500], faults=1)
    events.add(tx, EventKind.BLOCKED, events.Note(node=node, detail={"reason": reason[:500]}))
    block(tx, node)


def block(tx: Tx, node: str) -> None:
    """Block a node for a pause that doubles each time.

    After the pause the node gets one session and is blocked again, until it reports that it works.
    """
    faults = tx.fetch_value("SELECT faults FROM nodes WHERE id = :node", node=node)
    until = tx.now + min(BLOCK_S * 2.0 ** (faults - 1), MAX_BLOCK_S)
    tx.update("nodes", node, faults=min(faults + 1, _MAX_DOUBLINGS), blocked_until=until)
    tx.notify("timers")


def _end_quarantine(tx: Tx, node: str) -> None:
    if tx.run(
        "UPDATE nodes SET faults = 0, fault = '', blocked_until = NULL"
        " WHERE id = :node AND faults > 0",
        node=node,
    ):
        tx.notify("work")


def end_blocks(tx: Tx) -> None:
    """Unblock nodes whose pause is over, for a trial."""
    if tx.run("UPDATE nodes SET blocked_until = NULL WHERE blocked_until <= :now", now=tx.now):
        tx.notify("work")


def bind_tokens(tx: Tx, join: str) -> None:
    """Revoke the tokens of nodes that joined with another join token."""
    if tx.run("UPDATE control SET joined_by = :by WHERE joined_by <> :by", by=digest(join)):
        tx.run("UPDATE nodes SET token = ''")
        tx.notify("nodes")


def find_by_token(tx: Tx, token: str) -> str | None:
    """Return the node with this token; None for an unknown token or a node that is gone."""
    query = "SELECT id FROM nodes WHERE state <> 'gone' AND token = :token"
    node: str | None = tx.fetch_value(query, token=digest(token))
    return node


def list_views(tx: Tx) -> list[NodeView]:
    """List nodes by name, including those lost within the last day."""
    running: dict[str, int] = dict(
        tx.all("SELECT node, COUNT(*) FROM sessions WHERE node IS NOT NULL GROUP BY node")
    )
    rows = tx.all(f"SELECT {_COLUMNS} FROM nodes ORDER BY name, registered")  # noqa: S608 - constants
    return [_view(row, running.get(row[0], 0)) for row in rows]


def trim(tx: Tx, before: float) -> None:
    """Delete nodes that were lost before that time."""
    tx.run("DELETE FROM nodes WHERE state = 'gone' AND deadline < :before", before=before)


def live_slots(tx: Tx) -> tuple[int, int]:
    """Return the number of live nodes, and the sum of their slots."""
    live = tx.column("SELECT registration FROM nodes WHERE state = 'live'")
    return len(live), sum(_registration.decode(packed).slots for packed in live)


# --------------------------------------------------------------------------- shared state
def control(tx: Tx) -> Control:
    """Return the state that all nodes apply."""
    columns = "generation, paused, version"
    [row] = tx.all(f"SELECT {columns} FROM control")  # noqa: S608 - constants
    return to_struct(Control, columns, row)


def set_control(tx: Tx, new: Control) -> None:
    """Replace the shared state; notify all nodes."""
    tx.run(
        "UPDATE control SET generation = :generation, paused = :paused, version = :version",
        generation=new.generation,
        paused=new.paused.value if new.paused else None,
        version=new.version,
    )
    tx.notify("control")


def list_applied(tx: Tx, generation: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of nodes that have applied this generation, and of those that have not."""
    rows = tx.all("SELECT name, applied FROM nodes WHERE state <> 'gone' ORDER BY name")
    return (
        tuple(name for name, at in rows if at >= generation),
        tuple(name for name, at in rows if at < generation),
    )


def _view(row: Row, running: int) -> NodeView:
    known = msgspec.structs.asdict(_registration.decode(row[3]))
    return to_struct(NodeView, _COLUMNS, row, running=running, **known)
