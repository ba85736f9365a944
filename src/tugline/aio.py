"""Timeouts that can be paused, work beside other work, and signals, for asyncio."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from tugline import log

T = TypeVar("T")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class PausableTimeout:
    """`limit_s` seconds that pass only while the timeout is not paused."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._elapsed = 0.0
        self._running_since: float | None = None
        """Time of the last start or resume; None before the first use and while paused."""
        self.expired = False
        """Whether a block was ended because the time was up."""
        self._paused = False
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def elapsed(self) -> float:
        """Seconds charged so far."""
        since = self._running_since
        return self._elapsed + (time.monotonic() - since if since is not None else 0.0)

    def pause(self) -> None:
        """Stop charging time; pausing twice changes nothing."""
        self._elapsed = self.elapsed
        self._running_since = None
        self._paused = True
        self._reschedule(None)

    def resume(self) -> None:
        """Charge time again."""
        self._paused = False
        if self._timeouts:
            self._start()

    def credit(self, seconds: float) -> None:
        """Subtract `seconds` from the time charged."""
        self._elapsed -= seconds
        if self._running_since is not None:
            self._start()

    @contextlib.asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` in the block once the time is up. Starts at the first use."""
        async with asyncio.timeout(None) as timeout:
            self._timeouts.add(timeout)
            try:
                if not self._paused:
                    self._start()
                yield
            finally:
                self._timeouts.discard(timeout)
                self.expired = self.expired or timeout.expired()

    def _start(self) -> None:
        if self._running_since is None:
            self._running_since = time.monotonic()
        self._reschedule(asyncio.get_running_loop().time() + self.limit_s - self.elapsed)

    def _reschedule(self, when: float | None) -> None:
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(when)


def enforce_timeout(
    timeout: float | PausableTimeout,
) -> contextlib.AbstractAsyncContextManager[object]:
    """Raise `TimeoutError` in the block when the timeout, or its number of seconds, expires."""
    return timeout.enforce() if isinstance(timeout, PausableTimeout) else asyncio.timeout(timeout)


@contextlib.asynccontextmanager
async def run_beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the block lasts, then cancel it and wait for its end.

    An error that ends it is logged at once, and raised if the block ends without one.
    """
    tasks = [log.start_task(each, getattr(each, "__qualname__", "")) for each in work]
    try:
        yield
    finally:
        await _cancel(tasks)
    _raise_error(tasks)


async def run_until_one_ends(*works: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until the first one ends, cancel the others, raise the first one's error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        await _cancel(tasks)
    tasks.clear()
    _raise_error(ended)


async def run_together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run one or more coroutines together; return their results. The first error ends the others.

    It is raised as it is, and unlike those of `asyncio.TaskGroup` it is in no reference cycle.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _cancel(tasks)
    _raise_error(tasks)
    return [task.result() for task in tasks]


async def _cancel(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _raise_error(tasks: list[asyncio.Task[T]]) -> None:
    """If tasks have failed, raise the error of the first and empty the list.

    A task refers to its error, and an error to the frames that it passes: a frame that refers to
    the task would be kept until a garbage collection.
    """
    failed = [task for task in tasks if not task.cancelled() and task.exception() is not None]
    if failed:
        tasks.clear()
        failed.pop(0).result()


@contextlib.contextmanager
def handle_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or Ctrl-C; cancel the current task at the second."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    again = stop if task is None else task.cancel

    def on_signal() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, again)
        stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def finish(work: Awaitable[T]) -> T:
    """Run `work` to its end even if the caller is cancelled; raise the cancellation after it."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    try:
        result = task.result()
    finally:
        del task  # see `_raise_error`
    if cancelled:
        raise asyncio.CancelledError
    return result
