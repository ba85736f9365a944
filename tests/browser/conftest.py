"""The console in a real Chromium, on a real server, and what its tests do on every page."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from browser.chromium import Tab, chromium
from served import TOKENS, Served, serve

AXE = Path(__file__).resolve().parents[2] / "console/node_modules/axe-core/axe.min.js"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with nothing in it."""
    async with serve(f"sqlite:{tmp_path / 'server.db'}", tmp_path) as one:
        yield one


@pytest.fixture
async def tab(tmp_path: Path, served: Served) -> AsyncIterator[Tab]:
    """The console, with the token of its link; it neither complains nor asks another host."""
    async with chromium(tmp_path / "profile") as one:
        await one.visit(f"{served.url}/#token={TOKENS.read}")
        yield one
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith(served.url + "/")] == []


async def check_accessibility(tab: Tab, what: str, options: str = "{}") -> None:
    """No fault is found by axe, and nothing is wider than the window."""
    await tab.js(f"{await asyncio.to_thread(AXE.read_text)}; 0")
    found = await tab.js(
        f"axe.run(document, {options}).then(found => found.violations.map("
        "one => [one.id, one.nodes.map(node => node.html)]))"
    )
    assert found == [], (what, found)
    assert await tab.js("document.documentElement.scrollWidth <= innerWidth"), what


async def enter_token(tab: Tab, token: str) -> None:
    """Give the console the token that it asks for, once it asks."""
    await tab.until("document.querySelector('form')")
    await tab.js("document.querySelector('form input').focus()")
    await tab.send("Input.insertText", text=token)
    await tab.key("Enter")


async def act_as_client(tab: Tab, act: Callable[[], Awaitable[None]]) -> None:
    """Act with the read token, which is refused, and again with the one that is asked for.

    `act` waits for what it clicks on: the page comes back when it has a token.
    """
    await act()
    await tab.until("document.querySelector('form')?.innerText.includes('a read token')")
    await enter_token(tab, TOKENS.client)
    await act()
    tab.complaints.clear()  # Chromium notes the answer of 403
