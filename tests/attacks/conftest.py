from __future__ import annotations

from pathlib import Path

import pytest

from support.attacks import IMAGE, Arena
from support.containers import podman
from support.sandbox import WITH_PYTHON
from tugline.types import Workspace

__all__ = ["podman"]


def _arena(request: pytest.FixtureRequest, folder: Path) -> Arena:
    fields = {}
    if request.param == "container":
        engine = request.getfixturevalue("podman")
        fields = {"options": {"engine": engine}, "workspace": Workspace(image=IMAGE)}
    arena = Arena(name=request.param, folder=folder, **fields)
    if reason := arena.runtime.check_available():
        pytest.skip(f"{arena.name}: {reason}")
    return arena


@pytest.fixture(params=WITH_PYTHON)
def any_arena(request: pytest.FixtureRequest, tmp_path: Path) -> Arena:
    """Each sandbox, and plain processes without isolation, where the attack must succeed."""
    return _arena(request, tmp_path)


@pytest.fixture(params=WITH_PYTHON[1:])
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Arena:
    """Each isolated sandbox."""
    return _arena(request, tmp_path)
