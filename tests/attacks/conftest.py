from __future__ import annotations

from pathlib import Path

import pytest

from attacked import IMAGE, Arena
from containers import podman
from sandboxes import WITH_PYTHON
from tugline.types import Workspace

__all__ = ["podman"]


def _arena(request: pytest.FixtureRequest, folder: Path) -> Arena:
    given = {}
    if request.param == "container":
        engine = request.getfixturevalue("podman")
        given = {"options": {"engine": engine}, "workspace": Workspace(image=IMAGE)}
    arena = Arena(name=request.param, folder=folder, **given)
    if reason := arena.runtime.check_available():
        pytest.skip(f"{arena.name}: {reason}")
    return arena


@pytest.fixture(params=WITH_PYTHON)
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Arena:
    """Each sandbox, and a place that contains nothing, where the attack must succeed."""
    return _arena(request, tmp_path)


@pytest.fixture(params=WITH_PYTHON[1:])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Arena:
    """Each sandbox."""
    return _arena(request, tmp_path)
