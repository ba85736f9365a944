"""The way to the server, which may be away for as long as it likes: it is asked until it answers.

Only an answer that says what is wrong (a status from 400 to 499) comes out as an error: asking
again would not change it. What is asked is made anew for each try.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tugline import log
from tugline.errors import ServerError, StoreError
from tugline.node.stats import Stats
from tugline.protocol import Dispatcher

FIRST_S, LONGEST_S = 0.1, 5.0
"""How soon it is asked again: at first, and after many times."""
_BUSY = frozenset({408, 425, 429})
_log = log.get("node.link")
T = TypeVar("T")


class RetryingDispatcher:
    """A dispatcher, asked with patience."""

    def __init__(self, server: Dispatcher, stats: Stats) -> None:
        self.server, self._stats = server, stats
        self._away = False

    async def answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the server says, whenever that is. Raises `ServerError` for what it refuses."""
        pause = FIRST_S
        while True:
            try:
                answer = await ask()
            except (ServerError, StoreError) as error:
                if refused(error):
                    self._back()
                    raise
                self._gone(error)
            else:
                self._back()
                return answer
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_S)

    def _gone(self, error: Exception) -> None:
        if not self._away:
            self._away = True
            self._stats.outages += 1
            _log.warning("the server does not answer; going on without it", error=str(error))

    def _back(self) -> None:
        if self._away:
            self._away = False
            _log.warning("the server answers again")


def refused(error: Exception) -> bool:
    """Whether the server said no, and would say so again."""
    status = getattr(error, "status", None)
    return status is not None and 400 <= status < 500 and status not in _BUSY
