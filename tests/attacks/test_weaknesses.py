"""Missing isolation is reported."""

from __future__ import annotations

import asyncio

import pytest

from support.attacks import Arena
from tugline import log
from tugline.rollout.parts import Parts
from tugline.types import PluginSpec


async def test_weaknesses_of_local_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    """All weaknesses are one line, logged with the first session but without its id."""
    parts, local = Parts(), PluginSpec("local")
    log.configure()
    with log.about(session="s-0"):
        await asyncio.gather(*(parts.report_weaknesses(local) for _ in range(3)))
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 1
    assert "agents are not fully isolated" in output
    assert "s-0" not in output
    lines = parts.runtime(local).list_weaknesses()
    assert [output.count(line) for line in lines] == [1] * len(lines)
    for word in ("files", "network", "memory", "processes"):
        assert any(word in line for line in lines)


async def test_weaknesses_of_a_sandbox(arena: Arena) -> None:
    """Weaknesses are single lines; none is about isolation that the attacks confirm."""
    lines = await asyncio.to_thread(arena.runtime.list_weaknesses)
    assert all(line and "\n" not in line for line in lines)
    assert not [line for line in lines if "network" in line or "files" in line]
