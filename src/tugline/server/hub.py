"""Wake-ups by topic: who waits for work, orders, results, events or a log sleeps until it is there.

No polling: a waiter costs one future while nothing happens. It listens *before* it looks, so what
happens between its look and its wait is not lost. The database rings after each commit, with
PostgreSQL also for what other servers committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Subscription:
    """What one waiter listens to; a ring that came while it was busy is kept."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake its waiter."""
        self._rung.set()

    def take(self) -> bool:
        """Whether it rang since the last look; does not wait."""
        rung = self._rung.is_set()
        self._rung.clear()
        return rung

    async def heard(self, until: float | None = None) -> bool:
        """Wait for a ring until `until`, a time of the loop; False if none came."""
        try:
            async with asyncio.timeout_at(until):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True


class Hub:
    """Topics and who listens to them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._bells: dict[str, set[Subscription]] = {}

    @contextmanager
    def listen(self, *topics: str) -> Iterator[Subscription]:
        """A bell that rings for any of `topics`."""
        bell = Subscription()
        for topic in topics:
            self._bells.setdefault(topic, set()).add(bell)
        try:
            yield bell
        finally:
            for topic in topics:
                bells = self._bells[topic]
                bells.discard(bell)
                if not bells:
                    del self._bells[topic]

    def wake(self, topics: Iterable[str]) -> None:
        """Ring for all who listen to one of `topics`."""
        for topic in topics:
            for bell in self._bells.get(topic, ()):
                bell.ring()

    def wake_all(self) -> None:
        """Ring for everybody: something may have been missed."""
        self.wake(tuple(self._bells))

    @property
    def listeners(self) -> int:
        """How many wait, counted once for each topic."""
        return sum(len(bells) for bells in self._bells.values())
