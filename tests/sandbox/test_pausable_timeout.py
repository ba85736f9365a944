from __future__ import annotations

import asyncio
import time

import pytest

from tugline.sandbox.base import PausableTimeout, enforce_timeout


async def test_a_limit_ends_in_time() -> None:
    """Seconds and clocks alike."""
    for one in (0.05, PausableTimeout(0.05)):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with enforce_timeout(one):
                await asyncio.sleep(5)
        assert 0.04 < time.monotonic() - began < 1


async def test_a_held_clock_stands_still() -> None:
    """What is waited for while it is held is not on it, however often that is."""
    clock = PausableTimeout(0.3)
    began = time.monotonic()

    async def hold_twice() -> None:
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
            await hold_twice()
    assert 1.0 < time.monotonic() - began < 2.0
    assert clock.elapsed == pytest.approx(0.3, abs=0.1)


async def test_a_clock_goes_on_where_it_was() -> None:
    """A second program has what the first one left, and nothing once it is over."""
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


async def test_a_clock_that_is_held_from_the_start() -> None:
    """It does not begin before it goes."""
    clock = PausableTimeout(0.1)
    clock.pause()
    async with clock.enforce():
        await asyncio.sleep(0.2)
        assert clock.elapsed == 0.0
