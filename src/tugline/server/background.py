"""Work that goes on beside a server while it is open."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def run_beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the block lasts, then cancel it and wait for its end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
