"""Garbage collection that does not stop streams."""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import time
from collections.abc import AsyncIterator, Callable

from tugline.aio import run_beside


def freeze_gc(young: int = 20_000, middle: int = 20) -> None:
    """Exclude all existing objects from garbage collection; call once a server has started.

    Modules, templates and vocabularies are never freed, and scanning them would stop every stream
    for about 80 ms. Session state lives long and has few cycles, so it is scanned less often.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, 50)


@contextlib.asynccontextmanager
async def managed_gc(
    is_idle: Callable[[], bool], every_s: float = 10.0, full: int = 30
) -> AsyncIterator[None]:
    """Limit garbage collections to a few milliseconds during the block.

    Objects that survive two collections, such as the state of open sessions, are not scanned again,
    since they have hardly any cycles. Every `full` intervals of `every_s`, if `is_idle`, all
    objects are collected. Every interval, glibc returns free pages to the system, which it does not
    do by itself while blocks of open sessions lie between them: a third of the memory at 500
    sessions.
    """

    def exclude(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 1:
            gc.freeze()

    trim = getattr(ctypes.CDLL(None), "malloc_trim", time.sleep)  # glibc; others need no call

    async def tidy() -> None:
        for number in itertools.count():
            if number % full == 0 and is_idle():
                freeze_gc(young=300, middle=3)
            await asyncio.sleep(every_s)
            await asyncio.to_thread(trim, 0)

    gc.callbacks.append(exclude)
    try:
        async with run_beside(tidy()):
            yield
    finally:
        gc.callbacks.remove(exclude)
