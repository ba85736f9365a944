"""The gate that holds model calls while the engine's weights change."""

import asyncio
import time
from collections.abc import Callable

from tugline.errors import EngineError


class Gate:
    """A gate before the engine, and a clock that stands still while the gate is closed.

    The silence of an engine is measured with this clock: a paused engine sends nothing.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called after the gate was closed or opened."""
        self._event = asyncio.Event()
        self._event.set()
        self._closed_at = self._closed_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether requests may be sent."""
        return self._event.is_set()

    def now(self) -> float:
        """Return monotonic seconds, less those for which the gate was closed."""
        now = time.monotonic() if self.is_open else self._closed_at
        return now - self._closed_s

    def close(self) -> None:
        """Hold requests that have not been sent."""
        if self.is_open:
            self._closed_at = time.monotonic()
            self._event.clear()
            self.on_change()

    def open(self) -> None:
        """Release held requests."""
        if not self.is_open:
            self._closed_s += time.monotonic() - self._closed_at
            self._event.set()
            self.on_change()

    async def wait(self, within_s: float) -> None:
        """Wait until the gate is open. Raises `EngineError` after `within_s`."""
        if self.is_open:
            return
        try:
            async with asyncio.timeout(within_s):
                while not self.is_open:  # it may be closed again before this task runs
                    await self._event.wait()
        except TimeoutError as error:
            msg = f"the engine was paused for more than {within_s:.0f} s"
            raise EngineError(msg, status=503, retry_after=5.0) from error
