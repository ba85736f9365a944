from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tugline.errors import SandboxError
from tugline.rollout.sandboxes import PrewarmedSandbox
from tugline.sandbox.local import Local, LocalSandbox


class Boxes:
    """Real boxes; notes which are open."""

    def __init__(self, folder: Path, *, broken: bool = False) -> None:
        self.folder, self.broken = folder, broken
        self.opened: list[LocalSandbox] = []
        self.closed = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[LocalSandbox]:
        """One more."""
        if self.broken:
            msg = "no image"
            raise SandboxError(msg)
        async with Local().open(self.folder / str(len(self.opened))) as box:
            self.opened.append(box)
            try:
                yield box
            finally:
                self.closed += 1


async def prepared(boxes: Boxes, places: asyncio.Semaphore | None = None) -> PrewarmedSandbox:
    """A box ahead, opened."""
    warm = PrewarmedSandbox(boxes.open)
    warm.prepare(places)
    async with asyncio.timeout(5):
        while not (boxes.opened or boxes.broken):  # noqa: ASYNC110 - a file's doing
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    return warm


async def test_the_first_box_is_the_one_that_waits(tmp_path: Path) -> None:
    """It gets its files when it is asked for; the next is a new one; both are closed."""
    boxes = Boxes(tmp_path)
    warm = await prepared(boxes)
    async with contextlib.aclosing(warm):
        async with warm.open({"a/b.txt": "x"}) as box:
            assert box is boxes.opened[0]
            assert (box.workdir / "a" / "b.txt").read_text() == "x"
        assert boxes.closed == 1
        async with warm.open({"c": "y"}) as box:
            assert [path.name for path in box.workdir.iterdir()] == ["c"]
    assert (len(boxes.opened), boxes.closed) == (2, 2)


@pytest.mark.parametrize("where", ["workdir", "home", "itself", "undone"])
async def test_a_box_that_was_touched_is_not_used(where: str, tmp_path: Path) -> None:
    """What an agent put there, also if it covered its tracks, never meets the tests."""
    boxes = Boxes(tmp_path)
    warm = await prepared(boxes)
    [first] = boxes.opened
    if where == "itself":
        first.workdir.rmdir()
        first.workdir.mkdir()
    else:
        trace = (first.home if where == "home" else first.workdir) / "conftest.py"
        trace.write_text("evil")
        if where == "undone":
            trace.unlink()
    async with contextlib.aclosing(warm), warm.open({}) as box:
        assert box is not first
        assert not list(box.workdir.iterdir())
    assert boxes.closed == 2


async def test_a_box_that_cannot_be_opened_ahead_is_tried_again(tmp_path: Path) -> None:
    """The fault is told to who needs the box, not to who did not."""
    boxes = Boxes(tmp_path, broken=True)
    warm = await prepared(boxes)
    boxes.broken = False
    async with contextlib.aclosing(warm), warm.open({"a": "b"}) as box:
        assert (box.workdir / "a").exists()
    unused = await prepared(Boxes(tmp_path, broken=True))
    await unused.aclose()


async def test_a_box_that_nobody_wants_is_closed(tmp_path: Path) -> None:
    """Also one that is not open yet, and one for which there was no place."""
    boxes, places = Boxes(tmp_path), asyncio.Semaphore(1)
    warm = await prepared(boxes, places)
    assert places.locked()
    other = await prepared(boxes, places)
    await other.aclose()
    await warm.aclose()
    assert (len(boxes.opened), boxes.closed, places.locked()) == (1, 1, False)
    early = PrewarmedSandbox(boxes.open)
    early.prepare(None)
    await early.aclose()
    assert len(boxes.opened) - boxes.closed == 0
