"""Somebody who asks a server that is up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from house import House
from tugline.client.api import Client


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    """Somebody who asks it."""
    async with house.client(deadline_s=10.0) as made:
        yield made
