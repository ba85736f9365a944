"""A real control plane on SQLite behind a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from served import TOKENS, Served
from tugline.server.app import create_app, serve_api
from tugline.server.blobs import open_blobs
from tugline.server.checks import check_task
from tugline.server.control import ControlPlane
from tugline.server.database.database import open_database


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with nothing in it."""
    async with (
        ControlPlane(
            open_database(f"sqlite:{tmp_path / 'tugline.db'}"),
            open_blobs(str(tmp_path / "blobs")),
            folder=tmp_path,
            check=check_task,
        ) as control,
        aiohttp.ClientSession() as http,
    ):
        app = create_app(control, TOKENS)
        async with serve_api(app) as url:
            yield Served(url, app, control, http)
