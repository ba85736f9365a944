from __future__ import annotations

import asyncio
import time

import pytest

from tugline.aio import PausableTimeout, enforce_timeout


async def test_a_timeout_is_enforced() -> None:
    """The limit may be seconds or a `PausableTimeout`."""
    for limit in (0.05, PausableTimeout(0.05)):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with enforce_timeout(limit):
                await asyncio.sleep(5)
        assert 0.04 < time.monotonic() - began < 1


async def test_paused_time_does_not_count() -> None:
    """Pauses may begin before the block; pausing or resuming twice changes nothing."""
    clock = PausableTimeout(0.3)
    clock.pause()
    began = time.monotonic()

    async def pause_twice() -> None:
        await asyncio.sleep(0.4)
        assert clock.elapsed == 0.0
        clock.resume()
        for _ in range(2):
            clock.pause()
            clock.pause()
            await asyncio.sleep(0.4)
            clock.resume()
            clock.resume()
            await asyncio.sleep(0.05)
        await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        async with clock.enforce():
            await pause_twice()
    assert 1.4 < time.monotonic() - began < 2.4
    assert clock.elapsed == pytest.approx(0.3, abs=0.1)


async def test_a_timeout_can_be_continued() -> None:
    """The next block has the remaining time, or none after a timeout."""
    clock = PausableTimeout(0.2)
    async with clock.enforce():
        await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):
        async with clock.enforce():
            await asyncio.sleep(5)
    clock.pause()
    clock.resume()
    with pytest.raises(TimeoutError):
        async with clock.enforce():
            await asyncio.sleep(5)
