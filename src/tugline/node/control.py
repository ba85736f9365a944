"""What all nodes do together: hold model calls while weights change, and go on with the new ones.

A control is put in place in the background and counts as applied only when it is: the server's
barrier rests on that. A newer one replaces one that is still being put in place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tugline import log
from tugline.errors import EngineError
from tugline.protocol import Control, PauseMode
from tugline.rollout.rollout import Gateway

_PAUSE_S = 5.0
"""How long calls in flight are waited for before that is said in the log."""
_log = log.get("node.control")


class Pausable(Gateway, Protocol):
    """A gateway as a node has it."""

    url: str
    """As sandboxes see it."""

    async def pause(self, mode: PauseMode, *, within_s: float = 600.0) -> None:
        """Hold new calls; raises `EngineError` when those in flight are not over in time."""
        ...

    def resume(self) -> None:
        """Let calls go on."""
        ...

    def set_weights_version(self, version: int) -> None:
        """Announce what the engine now serves."""
        ...


class Controls:
    """The newest control, and whether it is in place."""

    def __init__(self, gateway: Pausable, on_hold: Callable[[bool], None]) -> None:
        """`on_hold` is told when calls begin to be held and when they go on."""
        self._gateway, self._on_hold = gateway, on_hold
        self._wanted, self._now = Control(), Control()
        self._applying: asyncio.Task[None] | None = None

    @property
    def applied(self) -> int:
        """Generation that is in place."""
        return self._now.generation

    @property
    def settled(self) -> bool:
        """Whether nothing is still being put in place."""
        return self._applying is None or self._applying.done()

    def put(self, control: Control) -> None:
        """Begin to put `control` in place unless it is there already."""
        if control == self._wanted:
            return
        self.close()
        self._wanted = control
        self._applying = asyncio.create_task(self._apply(control), name="node-control")

    async def wait(self, within_s: float) -> None:
        """Until it is in place, or for so long."""
        if self._applying is not None:
            await asyncio.wait({self._applying}, timeout=within_s)

    def close(self) -> None:
        """Stop putting it in place."""
        if self._applying is not None:
            self._applying.cancel()

    async def _apply(self, control: Control) -> None:
        if control.version != self._now.version:
            self._gateway.set_weights_version(control.version)
        if control.paused is None:
            self._gateway.resume()
            self._on_hold(False)
        else:
            self._on_hold(True)
            while not await self._paused(control.paused):
                pass
        self._now = control

    async def _paused(self, mode: PauseMode) -> bool:
        try:
            await self._gateway.pause(mode, within_s=_PAUSE_S)
        except EngineError as error:
            _log.warning("not paused yet", mode=mode, error=str(error))
            return False
        return True
