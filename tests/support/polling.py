"""Waiting for a condition."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any], within_s: float = 20.0) -> None:
    """Wait until a condition, which may be asynchronous, is true."""
    async with asyncio.timeout(within_s):
        while True:
            value = holds()
            if await value if inspect.isawaitable(value) else value:
                return
            await asyncio.sleep(0.005)
