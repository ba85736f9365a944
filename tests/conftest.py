"""What every test shares: a machine that others use too, and property tests without a clock."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from live_server import LiveServer

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what runs in the background with this signal ignored, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("tugline", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("tugline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with long timeouts first, so that none is left to one worker at the end."""
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0), mark.args[0] if mark else 0)
    items.sort(key=lambda item: -longest[item.path])


PLAIN = [
    *structlog.get_config()["processors"][:-1],
    structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
]
"""By default a logged exception is printed with all local variables, which takes seconds."""


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A command that a test runs in this process configures the log of that test alone."""
    structlog.configure(processors=PLAIN)
    yield
    structlog.reset_defaults()


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[LiveServer]:
    """A server that is up."""
    made = LiveServer(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
