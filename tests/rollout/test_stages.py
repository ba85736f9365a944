"""Cancellation and total time of a session's stages."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tugline.rollout.stages import CancelScope, Ending, ScopeEnded


async def test_a_cancelled_scope_ends_its_stage() -> None:
    """The stage raises `ScopeEnded`, and so do later ones; the task itself is not cancelled."""
    scope = CancelScope(5.0)

    async def run() -> Ending:
        with pytest.raises(ScopeEnded) as ended:
            async with scope.enforce():
                await asyncio.sleep(5)
        await asyncio.sleep(0)  # the request to cancel was withdrawn
        with pytest.raises(ScopeEnded):
            async with scope.enforce():
                pytest.fail("a stage after the end")
        return ended.value.ending

    stage = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    scope.cancel()
    scope.cancel()
    assert await stage is Ending.CANCELLED
    assert stage.cancelling() == 0


async def test_the_total_time_ends_a_stage() -> None:
    """A later cancellation does not change the reason; a timeout within the stage is not one."""
    scope = CancelScope(0.05)
    with pytest.raises(TimeoutError):
        async with scope.enforce(), asyncio.timeout(0.01):
            await asyncio.sleep(5)
    assert scope.ending is None
    with pytest.raises(ScopeEnded) as ended:
        async with scope.enforce():
            await asyncio.sleep(5)
    scope.cancel()
    assert ended.value.ending is scope.ending is Ending.OUT_OF_TIME


async def test_the_end_of_the_whole_task_is_passed_on() -> None:
    """A cancellation of the task is raised even if its scope has been cancelled as well."""
    scope = CancelScope()

    async def run() -> None:
        async with scope.enforce():
            await asyncio.sleep(5)

    task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    scope.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stage_that_ignores_its_end_leaves_no_cancellation_behind() -> None:
    """The task of a stage that suppressed its cancellation has none pending."""
    scope = CancelScope()

    async def run() -> int:
        async with scope.enforce():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(5)
        await asyncio.sleep(0)
        current = asyncio.current_task()
        return -1 if current is None else current.cancelling()

    stage = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    scope.cancel()
    assert await stage == 0
