"""What every test shares: a machine that others use too, and property tests without a clock."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from support.server import RestartableServer

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what runs in the background with this signal ignored, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("tugline", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("tugline")


MARKED_IN_FILE = {"slow", "cluster", "harness", "engines", "browser", "experiment"}
"""Markers that no helper applies: `test_house.py` checks it."""
LEFT_OUT = pytest.StashKey[list[str]]()
"""Tests that `--core` leaves out, as ``file::name (how many)``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects the core of a long suite."""
    parser.addoption("--core", action="store_true", help="leave out tests marked `nightly`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip test files without any test that `-m` selects: importing all takes half a minute.

    Only for expressions such as ``slow or cluster``; with others all files are imported.
    """
    selected = set(config.option.markexpr.split(" or "))
    if not selected <= MARKED_IN_FILE or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if any(f"pytest.mark.{name}" in text for name in selected) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of the core; put files with long timeouts first, then large ones.

    So no long file is left to one worker at the end.
    """
    if config.option.core:
        leave_out(config, items)
    tests = Counter(item.path for item in items)
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0), mark.args[0] if mark else 0)
    items.sort(key=lambda item: (-longest[item.path], -tests[item.path]))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the selected tests that are marked `nightly`."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    counts = Counter(item.nodeid.partition("[")[0] for item in nightly)
    config.stash[LEFT_OUT] = [f"{name} ({count})" for name, count in sorted(counts.items())]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what was left out from a worker of xdist, which collects tests, to the terminal."""
    output = getattr(session.config, "workeroutput", {})
    output["left_out"] = session.config.stash.get(LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive what a worker left out; all workers collect the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what the core of a suite leaves out."""
    if left_out := config.stash.get(LEFT_OUT, []):
        terminalreporter.section("left to the whole suite (nightly)")
        for line in left_out:
            terminalreporter.line(line)


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
async def live(tmp_path: Path) -> AsyncIterator[RestartableServer]:
    """A server that is up."""
    made = RestartableServer(tmp_path)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
