"""Sandboxes that are opened ahead of time for evaluators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.garbage import count_cycles
from support.polling import until
from tugline.errors import SandboxError
from tugline.rollout.parts import PrewarmedSandboxes
from tugline.sandbox.local import LocalRuntime, LocalSandbox


class Sandboxes:
    """Opens real sandboxes, and counts them."""

    def __init__(self, folder: Path, *, broken: bool = False) -> None:
        self.folder, self.broken = folder, broken
        self.opened: list[LocalSandbox] = []
        self.closed = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[LocalSandbox]:
        """Open one."""
        if self.broken:
            msg = "no image"
            raise SandboxError(msg)
        async with LocalRuntime().open(self.folder / str(len(self.opened))) as sandbox:
            self.opened.append(sandbox)
            try:
                yield sandbox
            finally:
                self.closed += 1


async def prewarm(sandboxes: Sandboxes) -> PrewarmedSandboxes:
    """A prewarmed sandbox that is open."""
    prewarmed = PrewarmedSandboxes(sandboxes.open)
    prewarmed.prepare(1)
    await until(lambda: sandboxes.opened or sandboxes.broken)
    await asyncio.sleep(0.05)
    return prewarmed


async def test_a_prewarmed_sandbox_is_used_once(tmp_path: Path) -> None:
    """A sandbox gets its files when it is used; the next one is new, and both are closed."""
    sandboxes = Sandboxes(tmp_path)
    prewarmed = await prewarm(sandboxes)
    async with contextlib.aclosing(prewarmed):
        async with prewarmed.open({"a/b.txt": "x"}) as sandbox:
            assert sandbox is sandboxes.opened[0]
            assert (sandbox.workdir / "a" / "b.txt").read_text() == "x"
        assert sandboxes.closed == 1
        async with prewarmed.open({"c": "y"}) as sandbox:
            assert [path.name for path in sandbox.workdir.iterdir()] == ["c"]
    assert (len(sandboxes.opened), sandboxes.closed) == (2, 2)


async def test_two_prewarmed_sandboxes_are_used_at_once(tmp_path: Path) -> None:
    """A third sandbox, when two prewarmed ones are in use, is new."""
    sandboxes = Sandboxes(tmp_path)
    prewarmed = PrewarmedSandboxes(sandboxes.open)
    prewarmed.prepare(2)
    async with contextlib.aclosing(prewarmed), contextlib.AsyncExitStack() as stack:
        await until(lambda: len(sandboxes.opened) == 2)
        used = [await stack.enter_async_context(prewarmed.open({})) for _ in range(3)]
        assert sorted(map(id, used)) == sorted(map(id, sandboxes.opened))
    assert sandboxes.closed == 3


@pytest.mark.parametrize("where", ["workdir", "home", "itself", "undone"])
async def test_a_changed_sandbox_is_not_used(where: str, tmp_path: Path) -> None:
    """A sandbox that was changed is not used, even if its files are as before."""
    sandboxes = Sandboxes(tmp_path)
    prewarmed = await prewarm(sandboxes)
    [first] = sandboxes.opened
    if where == "itself":
        first.workdir.rmdir()
        first.workdir.mkdir()
    else:
        trace = (first.home if where == "home" else first.workdir) / "conftest.py"
        trace.write_text("evil")
        if where == "undone":
            trace.unlink()
    async with contextlib.aclosing(prewarmed), prewarmed.open({}) as sandbox:
        assert sandbox is not first
        assert not list(sandbox.workdir.iterdir())
    assert sandboxes.closed == 2


async def test_errors_of_prewarming_are_not_raised(tmp_path: Path) -> None:
    """A sandbox that could not be prewarmed is opened again when it is used."""
    sandboxes = Sandboxes(tmp_path, broken=True)
    prewarmed = await prewarm(sandboxes)
    sandboxes.broken = False
    async with contextlib.aclosing(prewarmed), prewarmed.open({"a": "b"}) as sandbox:
        assert (sandbox.workdir / "a").exists()
    unused = await prewarm(Sandboxes(tmp_path, broken=True))
    await unused.aclose()


async def test_an_unused_sandbox_is_closed(tmp_path: Path) -> None:
    """A prewarmed sandbox that nobody used is closed, also one that is not open yet."""
    sandboxes = Sandboxes(tmp_path)
    prewarmed = await prewarm(sandboxes)
    await prewarmed.aclose()
    assert (len(sandboxes.opened), sandboxes.closed) == (1, 1)
    early = PrewarmedSandboxes(sandboxes.open)
    early.prepare(1)
    await early.aclose()
    assert len(sandboxes.opened) - sandboxes.closed == 0


@pytest.mark.parametrize("when", ["before it is open", "when it is open"])
async def test_closed_prewarmed_sandboxes_leave_no_cycles(when: str, tmp_path: Path) -> None:
    """Also closing one that is still being opened leaves nothing to the garbage collector."""
    with count_cycles() as cycles:
        prewarmed = PrewarmedSandboxes(Sandboxes(tmp_path).open)
        prewarmed.prepare(1)
        await asyncio.sleep(0.1 if when == "when it is open" else 0)
        await prewarmed.aclose()
        del prewarmed
    assert not cycles
