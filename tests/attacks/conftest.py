from __future__ import annotations

from pathlib import Path

import pytest

from attacked import Arena
from containers import podman

__all__ = ["podman"]

SANDBOXES = ["bubblewrap", pytest.param("podman", marks=pytest.mark.podman)]


def _arena(request: pytest.FixtureRequest, folder: Path) -> Arena:
    engine = request.getfixturevalue("podman") if request.param == "podman" else ""
    arena = Arena(request.param, folder, engine=engine)
    reason = arena.runtime().check_available()
    if reason is not None:
        pytest.skip(f"{arena.name}: {reason}")
    return arena


@pytest.fixture(params=["local", *SANDBOXES])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Arena:
    """Each sandbox, and a place that contains nothing, where the attack must succeed."""
    return _arena(request, tmp_path)


@pytest.fixture(params=SANDBOXES)
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Arena:
    """Each sandbox."""
    return _arena(request, tmp_path)
