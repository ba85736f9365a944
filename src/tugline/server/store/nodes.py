"""Nodes: their leases, and the state that all of them share.

The lease is the node's, not the session's: a node that does not renew in time is gone, and its
sessions are given to others (see `leases.expire_node`).
"""

import hashlib

import msgspec

from tugline.errors import FencedError
from tugline.protocol import Control, EventKind, NodeRegistration, NodeState, NodeView, PauseMode
from tugline.server.store import events
from tugline.server.store.base import Row, Tx, to_struct

_COLUMNS = "id, name, state, registration, registered, deadline, applied"
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
    detail: dict[str, str | int | float] = {"name": registration.name, "slots": registration.slots}
    events.add(tx, EventKind.JOINED, node=node, detail=detail)
    tx.notify("timers", "nodes")


def list_named(tx: Tx, name: str) -> list[str]:
    """Nodes of this name that are not gone."""
    rows = tx.all("SELECT id FROM nodes WHERE name = :name AND state <> 'gone'", name=name)
    return [node for (node,) in rows]


def state(tx: Tx, node: str) -> NodeState:
    """Raises `FencedError` for one that is gone or was never here."""
    row = tx.fetch_one("SELECT state FROM nodes WHERE id = :node AND state <> 'gone'", node=node)
    if row is None:
        msg = f"node {node!r} was lost: what it held is given to others; register again"
        raise FencedError(msg)
    return NodeState(row[0])


def renew(tx: Tx, node: str, applied: int, *, lease_s: float) -> None:
    """Extend its lease to `lease_s` from now, and record the applied generation."""
    deadline = tx.now + lease_s
    tx.run("UPDATE nodes SET deadline = :deadline WHERE id = :node", node=node, deadline=deadline)
    if tx.run(
        "UPDATE nodes SET applied = :applied WHERE id = :node AND applied < :applied",
        node=node,
        applied=applied,
    ):
        tx.notify("applied")


def drain(tx: Tx, node: str) -> None:
    """Give it no more work. Raises `FencedError`."""
    if state(tx, node) is NodeState.LIVE:
        tx.run("UPDATE nodes SET state = 'draining' WHERE id = :node", node=node)
        events.add(tx, EventKind.DRAINING, node=node)
        tx.notify(f"node:{node}")


def mark_dead(tx: Tx, node: str, reason: str) -> None:
    """Mark it as gone."""
    tx.run("UPDATE nodes SET state = 'gone' WHERE id = :node", node=node)
    events.add(tx, EventKind.LOST, node=node, detail={"reason": reason})
    tx.notify(f"node:{node}", "applied", "nodes")


def extend_all(tx: Tx, lease_s: float) -> None:
    """Restart all deadlines: the server was away, not the nodes."""
    tx.run(
        "UPDATE nodes SET deadline = :until WHERE state <> 'gone' AND deadline < :until",
        until=tx.now + lease_s,
    )
    tx.run("UPDATE sessions SET stop_at = :now WHERE stop IS NOT NULL", now=tx.now)


def list_expired(tx: Tx) -> list[str]:
    """Nodes whose lease has run out."""
    rows = tx.all("SELECT id FROM nodes WHERE state <> 'gone' AND deadline < :now", now=tx.now)
    return [node for (node,) in rows]


def list_live(tx: Tx) -> set[str]:
    """Nodes that may be given work."""
    return {node for (node,) in tx.all("SELECT id FROM nodes WHERE state = 'live'")}


def find_by_token(tx: Tx, token: str) -> str | None:
    """The node behind a token, unless it is gone."""
    row = tx.fetch_one(
        "SELECT id FROM nodes WHERE state <> 'gone' AND token = :token", token=digest(token)
    )
    return row[0] if row else None


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
    rows = tx.all("SELECT registration FROM nodes WHERE state = 'live'")
    return len(rows), sum(_registration.decode(row[0]).slots for row in rows)


# --------------------------------------------------------------------------- shared state
def control(tx: Tx) -> Control:
    """The state that all nodes apply."""
    [(generation, paused, version)] = tx.all("SELECT generation, paused, version FROM control")
    return Control(
        generation=generation, paused=None if paused is None else PauseMode(paused), version=version
    )


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
