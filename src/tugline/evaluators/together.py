"""Several things at once, of which the first that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order. Raises what the first one raised, when the others have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
