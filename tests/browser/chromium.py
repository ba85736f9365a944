"""A headless Chromium, driven over its debugging protocol without a library."""

import asyncio
import base64
import contextlib
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--remote-debugging-port=0", "--window-size=1400,900"),
]
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Tab:
    """One page; collects its errors, warnings and network requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.numbers = itertools.count(1)
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            reply = message.json()
            if "id" in reply:
                self.answers.pop(reply["id"]).set_result(reply)
            else:
                self._note(reply["method"], reply["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.errors.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            entry = params["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command; its result."""
        number = next(self.numbers)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        reply = await asyncio.wait_for(answer, 60)
        assert "error" not in reply, (method, reply)
        return reply["result"]

    async def js(self, code: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        reply = await self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, (code, reply["exceptionDetails"])
        return reply["result"].get("value")

    async def open(self, path: Path) -> None:
        """Open the file of a session's page and wait until it is ready."""
        await self.visit(path.as_uri())

    async def visit(self, url: str) -> None:
        """Open a page and wait until it is ready."""
        await self.send("Page.navigate", url=url)
        await self.until("document.querySelector('h1')")

    async def choose_file(self, selector: str, path: Path) -> None:
        """Choose a file in a file input."""
        root = (await self.send("DOM.getDocument"))["root"]["nodeId"]
        node = await self.send("DOM.querySelector", nodeId=root, selector=selector)
        await self.send("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(path)])

    async def picture(self) -> bytes:
        """A screenshot as PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot"))["data"])

    async def until(self, condition: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(seconds):
            while not await self.js(f"Boolean({condition})"):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def key(self, name: str) -> None:
        """Press and release a key, given by its name or its character."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=name)

    async def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches, with mouse events."""
        x, y = await self.js(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        await self.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.send("Input.dispatchMouseEvent", type="mouseReleased", **at)


@contextlib.asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Tab]:
    """Start a browser with one empty tab."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, "there is no Chromium: apt-get install chromium"
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        port = await asyncio.to_thread(_port, profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = [each for each in await reply.json() if each["type"] == "page"]
            url = tabs[0]["webSocketDebuggerUrl"]
            async with http.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.send(f"{domain}.enable")
                yield tab
                await tab.send("Browser.close")  # with its child processes
                await tab.reader
        await asyncio.wait_for(process.wait(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _port(file: Path) -> int:
    """Wait for the port, which the browser writes to a file."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.exists() and (text := file.read_text()):
            return int(text.split()[0])
        time.sleep(0.05)
    msg = "Chromium did not start within a minute"
    raise TimeoutError(msg)
