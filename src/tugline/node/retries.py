"""Calls of a node to its server, which may be unreachable for any time (I3)."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tugline import log
from tugline.errors import ServerError, StoreError
from tugline.node.telemetry import Stats
from tugline.protocol import Dispatcher

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
_BUSY = frozenset({408, 425, 429})
_log = log.get("node")
T = TypeVar("T")


class RetryingDispatcher:
    """Client of a dispatcher that retries calls until the server answers, for any time."""

    def __init__(self, server: Dispatcher, stats: Stats) -> None:
        self.server = server
        self._stats = stats
        self._away = False

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Retry `request` until it is answered. Raises `ServerError` for a refusal."""
        pause = FIRST_RETRY_S
        while True:
            try:
                response = await request()
            except (ServerError, StoreError) as error:
                if _is_refusal(error):
                    self._note_answer()
                    raise
                if not self._away:
                    self._away = True
                    self._stats.outages += 1
                    _log.warning("the server does not answer; sessions go on", error=str(error))
            else:
                self._note_answer()
                return response
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LAST_RETRY_S)

    def _note_answer(self) -> None:
        if self._away:
            self._away = False
            _log.warning("the server answers again")


def _is_refusal(error: ServerError | StoreError) -> bool:
    """Return whether the request would be refused again: status 400 to 499, but not `_BUSY`."""
    status = error.status if isinstance(error, ServerError) else None
    return status is not None and 400 <= status < 500 and status not in _BUSY
