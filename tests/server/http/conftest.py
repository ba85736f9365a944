"""A real control plane behind a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from served import Served, serve


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with nothing in it, on SQLite."""
    async with serve(f"sqlite:{tmp_path / 'tugline.db'}", tmp_path) as served:
        yield served


@pytest.fixture
async def server_of_each(store_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    """The same on SQLite and on PostgreSQL."""
    async with serve(store_url, tmp_path) as served:
        yield served
