from __future__ import annotations

from pathlib import Path

import pytest

from rig import rig, says
from tugline.gateway import app
from tugline.types import PluginSpec, Session, Task


async def test_sessions_that_are_over_are_forgotten_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that runs for weeks keeps the last ones in mind, and those that are live."""
    monkeypatch.setattr(app, "_KEPT", 3)
    task = Task(id="t", instruction="", harness=PluginSpec("shell"), evaluator=PluginSpec("tests"))
    async with rig(tmp_path, says("Hello.")) as it:
        await it.ask()
        for number in range(9):
            async with it.gateway.open(Session(id=f"o{number}", task="t", sample=0), task):
                pass
        assert len(it.gateway.read_calls("s1")) == 1
        assert it.gateway.read_calls("o8") == ()
        with pytest.raises(KeyError):
            it.gateway.read_calls("o0")
        assert len(it.gateway._recordings) == 4
        assert len(it.gateway._faults) == 3
