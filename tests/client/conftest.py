"""A server that is up, and somebody who asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from house import House
from tugline.client.api import Client


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A server that is up."""
    made = House(tmp_path)
    await made.start()
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.stop()


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    """Somebody who asks it."""
    async with house.client(deadline_s=10.0) as made:
        yield made
