"""One state for all nodes: the version of the weights, and whether model calls are held.

Every change is a new generation. A barrier waits until each live node has said that it put that
generation in place, or names those that did not in time (I3: no wait is unbounded).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from tugline.errors import Invalid
from tugline.protocol import Barrier, Control, EventKind, Pause, PauseMode
from tugline.server.store import events, leases, nodes
from tugline.server.store.base import Tx
from tugline.server.store.database import Database

WITHIN_S = 60.0
"""How long a barrier waits, unless the caller says."""


class Weights:
    """The control of all nodes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def announce(self, version: int) -> Barrier:
        """New weights: sessions that are too far behind them start again, where tasks say so."""
        if version < 0:
            msg = f"version is {version}, must be 0 or more"
            raise Invalid(msg, field="version")

        def op(tx: Tx) -> Control:
            control = _changed(tx, EventKind.VERSION, version=version)
            leases.abort_stale(tx, version, time.time())
            return control

        return await self._barrier(op, WITHIN_S)

    async def pause(self, pause: Pause) -> Barrier:
        """Hold model calls everywhere."""
        return await self._barrier(
            lambda tx: _changed(tx, EventKind.PAUSED, paused=pause.mode), pause.within_s
        )

    async def resume(self) -> Barrier:
        """Let model calls through again."""
        return await self._barrier(
            lambda tx: _changed(tx, EventKind.RESUMED, paused=None), WITHIN_S
        )

    async def _barrier(self, op: Callable[[Tx], Control], within_s: float) -> Barrier:
        until = asyncio.get_running_loop().time() + within_s
        with self._database.hub.listen("applied") as bell:
            control = await self._database.write(op)
            while True:
                applied, missing = await self._database.read(
                    lambda tx: nodes.applied(tx, control.generation)
                )
                if not missing or not await bell.heard(until):
                    break
        return Barrier(
            generation=control.generation,
            paused=control.paused,
            version=control.version,
            applied=applied,
            missing=missing,
        )


def _changed(tx: Tx, kind: EventKind, **fields: int | PauseMode | None) -> Control:
    """Put a new generation of the control in place, unless it says the same as the last."""
    old = nodes.control(tx)
    new = msgspec.structs.replace(old, **fields)
    if new == old:
        return old
    new = msgspec.structs.replace(new, generation=old.generation + 1)
    nodes.put_control(tx, new)
    mode = new.paused.value if new.paused else ""
    events.add(tx, kind, detail={"version": new.version, "mode": mode})
    return new
