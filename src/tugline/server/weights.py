"""Weights state of all nodes: their version, and whether model calls are paused.

Every change is a new generation. A barrier waits until each live node has applied it, or names
those that have not in time (I3: no wait is unbounded).
"""

from __future__ import annotations

import asyncio

import msgspec

from tugline.errors import Invalid
from tugline.protocol import Barrier, Control, EventKind, Pause, PauseMode
from tugline.server.store import events, leases, nodes
from tugline.server.store.base import Tx
from tugline.server.store.database import Database

WITHIN_S = 60.0
"""How long a barrier waits by default."""


class Weights:
    """Changes of the state that all nodes share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def announce(self, version: int) -> Barrier:
        """Announce new weights; sessions too far behind restart if their task says so.

        Raises `Invalid`.
        """
        if version < 0:
            msg = f"version is {version}, must be 0 or more"
            raise Invalid(msg, field="version")
        control = await self._database.write(_announce, version)
        return await self._barrier(control, WITHIN_S)

    async def pause(self, pause: Pause) -> Barrier:
        """Hold model calls on all nodes; waits for them, at most `within_s`."""
        control = await self._database.write(
            lambda tx: _change(tx, EventKind.PAUSED, paused=pause.mode)
        )
        return await self._barrier(control, pause.within_s)

    async def resume(self) -> Barrier:
        """Let model calls through again."""
        control = await self._database.write(lambda tx: _change(tx, EventKind.RESUMED, paused=None))
        return await self._barrier(control, WITHIN_S)

    async def _barrier(self, control: Control, within_s: float) -> Barrier:
        until = asyncio.get_running_loop().time() + within_s
        with self._database.hub.subscribe("applied") as subscription:
            while True:
                applied, missing = await self._database.read(nodes.list_applied, control.generation)
                if not missing or not await subscription.wait(until):
                    break
        return Barrier(
            generation=control.generation,
            paused=control.paused,
            version=control.version,
            applied=applied,
            missing=missing,
        )


def _announce(tx: Tx, version: int) -> Control:
    control = _change(tx, EventKind.VERSION, version=version)
    leases.abort_stale(tx, version)
    return control


def _change(tx: Tx, kind: EventKind, **fields: int | PauseMode | None) -> Control:
    """Start a new generation of the shared state, unless nothing changes."""
    old = nodes.control(tx)
    new = msgspec.structs.replace(old, **fields)
    if new == old:
        return old
    new = msgspec.structs.replace(new, generation=old.generation + 1)
    nodes.set_control(tx, new)
    mode = new.paused.value if new.paused else ""
    events.add(tx, kind, detail={"version": new.version, "mode": mode})
    return new
