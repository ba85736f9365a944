"""Rows of nodes: who may be given work, until when each is believed to live, and what all share.

The lease is the node's, not the session's: one that does not renew in time is gone, and everything
it held is somebody else's (see `leases.lose`).
"""

from __future__ import annotations

import hashlib

import msgspec

from tugline.errors import FencedError
from tugline.protocol import Control, EventKind, NodeRegistration, NodeState, NodeView, PauseMode
from tugline.server.store import events
from tugline.server.store.base import Row, Tx

_COLUMNS = "id, name, state, hello, registered, deadline, applied"
_hello = msgspec.msgpack.Decoder(NodeRegistration)


def digest(token: str) -> str:
    """What is kept of a node's token."""
    return hashlib.sha256(token.encode()).hexdigest()


def add(
    tx: Tx, node: str, hello: NodeRegistration, token: str, *, now: float, lease_s: float
) -> None:
    """Take a node in."""
    tx.run(
        "INSERT INTO nodes (id, name, token, hello, state, registered, deadline)"
        " VALUES (:node, :name, :token, :hello, 'live', :now, :deadline)",
        node=node,
        name=hello.name,
        token=digest(token),
        hello=msgspec.msgpack.encode(hello),
        now=now,
        deadline=now + lease_s,
    )
    events.add(tx, EventKind.JOINED, node=node, detail={"name": hello.name, "slots": hello.slots})
    tx.wake("timers", "nodes")


def named(tx: Tx, name: str) -> list[str]:
    """Nodes of this name that are not gone."""
    rows = tx.all("SELECT id FROM nodes WHERE name = :name AND state <> 'gone'", name=name)
    return [node for (node,) in rows]


def state(tx: Tx, node: str) -> NodeState:
    """Raises `FencedError` for one that is gone or was never here."""
    row = tx.one("SELECT state FROM nodes WHERE id = :node AND state <> 'gone'", node=node)
    if row is None:
        msg = f"node {node!r} was lost: what it held is given to others; register again"
        raise FencedError(msg)
    return NodeState(row[0])


def renew(tx: Tx, node: str, applied: int, *, now: float, lease_s: float) -> None:
    """Believe it to live until `lease_s` from now."""
    tx.run(
        "UPDATE nodes SET deadline = :deadline WHERE id = :node", node=node, deadline=now + lease_s
    )
    if tx.run(
        "UPDATE nodes SET applied = :applied WHERE id = :node AND applied < :applied",
        node=node,
        applied=applied,
    ):
        tx.wake("applied")


def drain(tx: Tx, node: str) -> None:
    """Give it nothing more."""
    if state(tx, node) is NodeState.LIVE:
        tx.run("UPDATE nodes SET state = 'draining' WHERE id = :node", node=node)
        events.add(tx, EventKind.DRAINING, node=node)
        tx.wake(f"node:{node}")


def bury(tx: Tx, node: str, reason: str) -> None:
    """It is gone."""
    tx.run("UPDATE nodes SET state = 'gone' WHERE id = :node", node=node)
    events.add(tx, EventKind.LOST, node=node, detail={"reason": reason})
    tx.wake(f"node:{node}", "applied", "nodes")


def spare(tx: Tx, now: float, lease_s: float) -> None:
    """Start all clocks anew: it was the server that was away, not the nodes."""
    tx.run(
        "UPDATE nodes SET deadline = :until WHERE state <> 'gone' AND deadline < :until",
        until=now + lease_s,
    )
    tx.run("UPDATE sessions SET stop_at = :now WHERE stop IS NOT NULL", now=now)


def late(tx: Tx, now: float) -> list[str]:
    """Nodes whose lease has run out."""
    rows = tx.all("SELECT id FROM nodes WHERE state <> 'gone' AND deadline < :now", now=now)
    return [node for (node,) in rows]


def live(tx: Tx) -> set[str]:
    """Nodes that may be given work."""
    return {node for (node,) in tx.all("SELECT id FROM nodes WHERE state = 'live'")}


def of_token(tx: Tx, token: str) -> str | None:
    """The node behind a token, unless it is gone."""
    row = tx.one(
        "SELECT id FROM nodes WHERE state <> 'gone' AND token = :token", token=digest(token)
    )
    return row[0] if row else None


def all(tx: Tx) -> list[NodeView]:  # noqa: A001 - reads as nodes.all
    """Nodes that are not gone, and those that went within the last day, by name."""
    running: dict[str, int] = dict(
        tx.all("SELECT node, COUNT(*) FROM sessions WHERE node IS NOT NULL GROUP BY node")
    )
    rows = tx.all(f"SELECT {_COLUMNS} FROM nodes ORDER BY name, registered")  # noqa: S608 - constants
    return [_view(row, running.get(row[0], 0)) for row in rows]


def trim(tx: Tx, before: float) -> None:
    """Forget nodes that were lost before that time."""
    tx.run("DELETE FROM nodes WHERE state = 'gone' AND deadline < :before", before=before)


def capacity(tx: Tx) -> tuple[int, int]:
    """How many live nodes there are, and their slots together."""
    hellos = [
        _hello.decode(row[0]) for row in tx.all("SELECT hello FROM nodes WHERE state = 'live'")
    ]
    return len(hellos), sum(hello.slots for hello in hellos)


# --------------------------------------------------------------------------- what all share
def control(tx: Tx) -> Control:
    """What all nodes are to put in place."""
    [(generation, paused, version)] = tx.all("SELECT generation, paused, version FROM control")
    return Control(
        generation=generation,
        paused=None if paused is None else PauseMode(paused),
        version=version,
    )


def put_control(tx: Tx, new: Control) -> None:
    """Tell all nodes."""
    tx.run(
        "UPDATE control SET generation = :generation, paused = :paused, version = :version",
        generation=new.generation,
        paused=new.paused.value if new.paused else None,
        version=new.version,
    )
    tx.wake("control")


def applied(tx: Tx, generation: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the nodes that have put this generation in place, and of those that have not."""
    rows = tx.all("SELECT name, applied FROM nodes WHERE state <> 'gone' ORDER BY name")
    return (
        tuple(name for name, at in rows if at >= generation),
        tuple(name for name, at in rows if at < generation),
    )


def _view(row: Row, running: int) -> NodeView:
    node, name, state_, hello, registered, deadline, applied_ = row
    said = _hello.decode(hello)
    return NodeView(
        id=node,
        name=name,
        state=NodeState(state_),
        slots=said.slots,
        capacity=said.capacity,
        running=running,
        gateway=said.gateway,
        labels=said.labels,
        versions=said.versions,
        registered=registered,
        deadline=deadline,
        applied=applied_,
    )
