"""The console in a real Chromium on a real server, and helpers of its tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from browser.busy import HOSTILE, commit
from browser.chromium import Tab, chromium
from support.server import TOKENS, RunningServer, serve
from tugline.protocol import NodeRegistered, Work
from tugline.types import Trajectory

TURNS = "[...document.querySelectorAll('[aria-label=Turns] [role=option]:not([aria-disabled])')]"
"""Calls in the list of turns."""
DRAWN = "performance.getEntriesByName('tokens drawn').length"
TOKENS_BOX = "document.querySelector('[aria-label=Tokens] [role=region]')"
"""The tokens of a trace, which can have the focus."""
TOKEN_FACTS = "document.querySelector('[aria-label=Tokens] [aria-live]').innerText"
"""The text, id, position ... of the selected token."""
AXE = Path(__file__).resolve().parents[2] / "console/node_modules/axe-core/axe.min.js"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """An empty server."""
    async with serve(f"sqlite:{tmp_path / 'server.db'}", tmp_path) as server:
        yield server


@pytest.fixture
async def tab(tmp_path: Path, server: RunningServer) -> AsyncIterator[Tab]:
    """The console, opened with its link; no errors, and no requests to other hosts."""
    async with chromium(tmp_path / "profile") as tab:
        await tab.visit(f"{server.url}/#token={TOKENS.read}")
        yield tab
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith(server.url + "/")] == []


class Evidence:
    """A server, and a node that is played by the test."""

    def __init__(self, server: RunningServer, node: NodeRegistered, folder: Path) -> None:
        self.server, self.node = server, node
        self.recordings = folder / "nodes" / "n" / "recordings"
        self.recordings.mkdir(parents=True)

    async def lease(self, task: str, samples: int, run: str = "", **tags: str) -> list[Work]:
        """Submit a task, to a run if it is given, and lease all its sessions."""
        changes = {"id": task, "samples": samples, "instruction": HOSTILE, "tags": tags}
        await self.server.submit(run, **changes)
        orders = await self.server.lease(self.node, 0, 0.0)
        done = orders.control.generation
        work = await self.server.lease(self.node, samples, applied=done)
        return sorted(work.work, key=lambda each: each.session.sample)

    def store_recording(self, work: Work, recording: Path) -> None:
        """Move a recording to where the server's own node has that of a session."""
        session = work.session
        recording.rename(self.recordings / f"{session.id}.{session.epoch}.rec")

    async def commit(self, work: Work, trajectory: Trajectory, **changes: object) -> None:
        """Commit a trajectory for a session."""
        of = work.session
        own = {"session": of.id, "task": of.task, "sample": of.sample, **changes}
        await commit(self.server, self.node, msgspec.structs.replace(trajectory, **own), of.epoch)


@pytest.fixture
async def evidence(tmp_path: Path, server: RunningServer) -> Evidence:
    """An empty server, and a node."""
    return Evidence(server, await server.join(), tmp_path)


async def open_page(tab: Tab, server: RunningServer, path: str, ready: str) -> str:
    """Open a page, wait until `ready` is true, and return its text."""
    await tab.visit(server.url + path)
    await tab.until(ready)
    return await tab.js("document.querySelector('main').innerText")


async def check_accessibility(tab: Tab, path: str, options: str = "{}") -> None:
    """Check that axe reports no violation, and that nothing is wider than the window."""
    await tab.js(f"{await asyncio.to_thread(AXE.read_text)}; 0")
    violations = await tab.js(
        f"axe.run(document, {options}).then(result => result.violations.map("
        "each => [each.id, each.nodes.map(node => node.html)]))"
    )
    assert violations == [], (path, violations)
    assert await tab.js("document.documentElement.scrollWidth <= innerWidth"), path


async def set_size(tab: Tab, width: int, height: int = 900) -> None:
    """Set the size of the window in pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await tab.send("Emulation.setDeviceMetricsOverride", **size)


async def enter_token(tab: Tab, token: str) -> None:
    """Enter a token once the console asks for one."""
    await tab.until("document.querySelector('form')")
    await tab.js("document.querySelector('form input').focus()")
    await tab.send("Input.insertText", text=token)
    await tab.key("Enter")


async def act_as_client(tab: Tab, act: Callable[[], Awaitable[None]]) -> None:
    """Act with the read token, which is refused, and again with a client token.

    `act` must wait for what it clicks on, since the page is drawn again with the new token.
    """
    await act()
    await tab.until("document.querySelector('form')?.innerText.includes('a read token')")
    await enter_token(tab, TOKENS.client)
    await act()
    tab.errors.clear()  # Chromium logs the status 403
