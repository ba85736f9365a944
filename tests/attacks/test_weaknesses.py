"""What is not contained is said, at the start and on a page."""

from __future__ import annotations

import asyncio

import pytest

from attacked import Arena
from tugline import log
from tugline.rollout.parts import Parts
from tugline.types import PluginSpec


async def test_what_local_does_not_contain_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each, once, when its first session comes."""
    parts, local = Parts(), PluginSpec("local")
    log.configure()
    await asyncio.gather(*(parts.report_weaknesses(local) for _ in range(3)))
    output = capsys.readouterr().err
    lines = parts.runtime(local).list_weaknesses()
    assert [output.count(line) for line in lines] == [1] * len(lines)
    for word in ("files", "network", "memory", "processes"):
        assert any(word in line for line in lines)


async def test_what_a_sandbox_does_not_contain_here_is_known(sandbox: Arena) -> None:
    """Lines for people, and none of them that every attack on this machine disproves."""
    lines = await asyncio.to_thread(sandbox.runtime.list_weaknesses)
    assert all(line and "\n" not in line for line in lines)
    assert not [line for line in lines if "network" in line or "files" in line]
