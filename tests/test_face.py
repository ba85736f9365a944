"""The public names of ``tugline``, and the cost of importing it."""

from __future__ import annotations

from importlib import metadata

import pytest

import tugline
from support.commands import run_python

NAMES = [
    "Boundary", "Callback", "Client", "Conflict", "Failure", "Group", "GroupResults", "Invalid",
    "Ledger", "Limits", "Missing", "PluginSpec", "Policy", "Result", "Reward", "Sampling",
    "ServerError", "Stale", "Status", "SyncClient", "Task", "Trace", "Trajectory", "TuglineError",
    "UsageError", "load_tasks", "run", "run_async",
]  # fmt: skip


def test_only_public_names_can_be_imported() -> None:
    """The public names can be imported, and no others."""
    assert dir(tugline) == sorted(NAMES)
    for name in NAMES:
        assert getattr(tugline, name).__name__ == name
    assert tugline.__version__ == metadata.version("tugline")
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = tugline.Klient


def test_importing_tugline_loads_no_library() -> None:
    """Libraries are loaded with the first name that needs them."""
    code = "import sys, tugline; print({'numpy', 'aiohttp', 'msgspec'} & sys.modules.keys())"
    assert run_python(code).stdout == "set()\n"
