"""Notifications by topic, for waiting without polling.

A waiter costs one future while nothing happens. It subscribes *before* it reads, so a change
between its read and its wait is not lost. The database notifies after each commit, with PostgreSQL
also for commits of other servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Subscription:
    """One subscriber's pending notification; one that comes while it is busy is kept."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Wake the subscriber."""
        self._notified.set()

    def poll(self) -> bool:
        """Whether it was notified since the last look; does not wait."""
        notified = self._notified.is_set()
        self._notified.clear()
        return notified

    async def wait(self, until: float | None = None) -> bool:
        """Wait for a notification until `until`, a time of the loop; False if none came."""
        try:
            async with asyncio.timeout_at(until):
                await self._notified.wait()
        except TimeoutError:
            return False
        self._notified.clear()
        return True


class Hub:
    """Topics and their subscribers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._topics: dict[str, set[Subscription]] = {}

    @contextmanager
    def subscribe(self, *topics: str) -> Iterator[Subscription]:
        """Subscribe to all of `topics` while the block lasts."""
        subscription = Subscription()
        for topic in topics:
            self._topics.setdefault(topic, set()).add(subscription)
        try:
            yield subscription
        finally:
            for topic in topics:
                subscribers = self._topics[topic]
                subscribers.discard(subscription)
                if not subscribers:
                    del self._topics[topic]

    def notify(self, topics: Iterable[str]) -> None:
        """Wake all subscribers of `topics`."""
        for topic in topics:
            for subscription in self._topics.get(topic, ()):
                subscription.notify()

    def notify_all(self) -> None:
        """Wake everybody: something may have been missed."""
        self.notify(tuple(self._topics))

    def has_subscribers(self, topic: str) -> bool:
        """Whether anybody waits for this topic."""
        return topic in self._topics

    @property
    def subscriptions(self) -> int:
        """How many there are, counted once for each topic."""
        return sum(map(len, self._topics.values()))
