from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tugline.aio import (
    PausableTimeout,
    enforce_timeout,
    finish,
    run_beside,
    run_together,
    run_until_one_ends,
)


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


# --------------------------------------------------------------------------- work beside other work
async def fail(error: str, after: int = 0) -> str:
    """Raise `ValueError` after some turns of the loop."""
    for _ in range(after):
        await asyncio.sleep(0)
    raise ValueError(error)


async def wait_for_ever(ends: list[str]) -> str:
    """Wait until it is cancelled."""
    try:
        return await asyncio.get_running_loop().create_future()
    finally:
        ends.append("cancelled")


async def test_work_together_ends_together() -> None:
    """Results have the order of the works; an error or a cancellation ends all of them."""

    async def give(value: int) -> int:
        await asyncio.sleep(0)
        return value

    assert await run_together(*map(give, range(3))) == [0, 1, 2]
    ends: list[str] = []
    with pytest.raises(ValueError, match="first"):
        await run_together(wait_for_ever(ends), fail("second", 50), fail("first", 1))
    assert ends == ["cancelled"]
    both = asyncio.create_task(run_together(wait_for_ever(ends), wait_for_ever(ends)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await both
    assert ends == ["cancelled"] * 3


async def fail_beside() -> None:
    """Fail in work that `run_beside` runs."""
    async with run_beside(fail_quietly()):
        await asyncio.sleep(0.01)


async def fail_quietly() -> None:
    """Fail without a result."""
    await fail("beside")


@pytest.mark.parametrize(
    "work",
    [
        lambda: run_together(wait_for_ever([]), fail("x", 1), fail("y", 1)),
        lambda: run_until_one_ends(fail("x"), wait_for_ever([])),
        lambda: finish(fail("x", 3)),
        fail_beside,
    ],
    ids=["together", "until one ends", "to the end", "beside"],
)
async def test_errors_of_tasks_keep_nothing(work: Callable[[], Awaitable[Any]]) -> None:
    """What failed is freed at once, though an error refers to the frames that it passes."""

    class Held:
        pass

    async def call() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        await work()

    seen: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011 - whatever its text
            await call()
        await asyncio.sleep(0)
        assert seen[0]() is None
    finally:
        gc.enable()
