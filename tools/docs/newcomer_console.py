"""Take pictures of the console in a real Chromium while sessions run, for `newcomer.py`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from browser.chromium import Tab, chromium

WIDTH, HEIGHT = 900, 524
"""Size of the picture below its caption, in CSS pixels."""
PIXELS = 1.6
"""Picture pixels for each CSS pixel."""
WIDER = 1.25
"""Factor by which the console's window is larger than the picture, in which it is scaled down."""
EVERY_S = 4.0
"""Seconds between two pictures of running sessions."""
SETTLE_S = 1.5
"""Seconds to wait for the rest of a page after its first rows."""
SOLVED = """
(rows => (rows.find(row => row.querySelector(".number").innerText === "1") ?? rows[0])
  .querySelector("a").href)([...document.querySelectorAll("tbody tr:has(a)")])
"""
"""JavaScript: address of the first listed session with reward 1."""


@contextlib.asynccontextmanager
async def open_tab(height: int, wider: float = 1.0) -> AsyncIterator[Tab]:
    """Open a tab with the dark theme; its pictures are `PIXELS` times `WIDTH` pixels wide."""
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(Path(profile)) as tab:
            size = {"width": round(WIDTH * wider), "height": round(height * wider)}
            ratio = {"deviceScaleFactor": PIXELS / wider, "mobile": False}
            await tab.send("Emulation.setDeviceMetricsOverride", **size, **ratio)
            await tab.send("Emulation.setScrollbarsHidden", hidden=True)
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            await tab.send("Emulation.setEmulatedMedia", features=dark)
            yield tab


async def watch(tab: Tab, link: str, folder: Path, name: str, wait: Callable[[], None]) -> None:
    """Take pictures of a page, ``console-NAME-NUMBER.png``, until `wait` returns."""
    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await tab.visit(link)
    number = 0
    while not waiting.done():
        await take(tab, folder, f"{name}-{number:02}")
        await asyncio.wait([waiting], timeout=EVERY_S)
        number += 1
    await waiting


async def take(tab: Tab, folder: Path, name: str) -> None:
    """Write a picture as ``console-NAME.png``."""
    await asyncio.sleep(SETTLE_S)
    (folder / f"console-{name}.png").write_bytes(await tab.picture())


async def visit_training(link: str, folder: Path, wait: Callable[[], None]) -> None:
    """Take pictures of the page of a training until `wait` returns."""
    async with open_tab(HEIGHT, WIDER) as tab:
        await watch(tab, link, folder, "train", wait)
        tab.errors.clear()  # the console notices that its server has ended


async def visit(link: str, folder: Path, wait: Callable[[], None]) -> None:
    """Take pictures of the overview until `wait` returns, then of a solved session."""
    async with open_tab(HEIGHT, WIDER) as tab:
        await watch(tab, link, folder, "run", wait)
        await take(tab, folder, "end-overview")
        address = link.partition("#")[0]
        await tab.visit(f"{address}sessions?status=completed")
        await tab.until("document.querySelector('tbody tr a')")
        await take(tab, folder, "end-sessions")
        session = await tab.js(SOLVED)
        await tab.visit(session)
        await take(tab, folder, "end-session")
        await tab.visit(f"{session}?tab=patch&colour=logprob")
        await take(tab, folder, "end-patch")
