"""Looks at the console in a real Chromium while sessions run, for `newcomer.py`."""

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
"""Of the picture below its caption, in CSS pixels."""
PIXELS = 1.6
"""Of the picture for each of these."""
WIDER = 1.25
"""The console needs more room, so its pictures are shown that much smaller."""
EVERY_S = 4.0
"""Between two looks at the running sessions."""
SETTLE_S = 1.5
"""For what a page still fetches after its first rows."""
SOLVED = """
(rows => (rows.find(row => row.querySelector(".number").innerText === "1") ?? rows[0])
  .querySelector("a").href)([...document.querySelectorAll("tbody tr:has(a)")])
"""
"""The page of the first listed session with reward 1."""


@contextlib.asynccontextmanager
async def open_tab(height: int, wider: float = 1.0) -> AsyncIterator[Tab]:
    """A dark tab, whose pictures have `PIXELS` times `WIDTH` pixels in a row."""
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(Path(profile)) as tab:
            size = {"width": round(WIDTH * wider), "height": round(height * wider)}
            ratio = {"deviceScaleFactor": PIXELS / wider, "mobile": False}
            await tab.send("Emulation.setDeviceMetricsOverride", **size, **ratio)
            await tab.send("Emulation.setScrollbarsHidden", hidden=True)
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            await tab.send("Emulation.setEmulatedMedia", features=dark)
            yield tab


async def visit(link: str, folder: Path, wait: Callable[[], None]) -> None:
    """Follow the overview until `wait` returns, then look at a session that solved its task.

    Pictures are written as ``console-NAME.png``.
    """

    async def look(name: str) -> None:
        await asyncio.sleep(SETTLE_S)
        (folder / f"console-{name}.png").write_bytes(await tab.picture())

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    async with open_tab(HEIGHT, WIDER) as tab:
        await tab.visit(link)
        number = 0
        while not waiting.done():
            await look(f"run-{number:02}")
            await asyncio.wait([waiting], timeout=EVERY_S)
            number += 1
        await waiting
        await look("end-overview")
        address = link.partition("#")[0]
        await tab.visit(f"{address}sessions?status=completed")
        await tab.until("document.querySelector('tbody tr a')")
        await look("end-sessions")
        session = await tab.js(SOLVED)
        await tab.visit(session)
        await look("end-session")
        await tab.visit(f"{session}?tab=patch&colour=logprob")
        await look("end-patch")
