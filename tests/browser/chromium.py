"""A headless Chromium, driven over its own debugging protocol; no library is needed for that."""

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
    """One page: asks it things, and remembers what it complained about and asked the network."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.numbers = itertools.count(1)
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
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
            self.complaints.append(details.get("exception", {}).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.complaints.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            entry = params["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """One command and its result."""
        number = next(self.numbers)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        reply = await asyncio.wait_for(answer, 60)
        assert "error" not in reply, (method, reply)
        result: dict[str, Any] = reply["result"]
        return result

    async def js(self, code: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        reply = await self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, (code, reply["exceptionDetails"])
        return reply["result"].get("value")

    async def open(self, path: Path) -> None:
        """Go to a file and wait until the page has been put together."""
        await self.send("Page.navigate", url=path.as_uri())
        await self.until("window.tugline !== undefined")

    async def visit(self, url: str) -> None:
        """Go to a page of the console and wait until it is there."""
        await self.send("Page.navigate", url=url)
        await self.until("document.querySelector('h1')")

    async def choose_file(self, what: str, path: Path) -> None:
        """Give a file to the input that a selector finds."""
        root = (await self.send("DOM.getDocument"))["root"]["nodeId"]
        found = await self.send("DOM.querySelector", nodeId=root, selector=what)
        await self.send("DOM.setFileInputFiles", nodeId=found["nodeId"], files=[str(path)])

    async def picture(self) -> bytes:
        """What can be seen, as a PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot"))["data"])

    async def until(self, condition: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(seconds):
            while not await self.js(f"Boolean({condition})"):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def key(self, name: str) -> None:
        """Press and release a key, by its name or as the character that it writes."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=name)

    async def click(self, what: str) -> None:
        """Click in the middle of the first element that a selector finds, with a real mouse."""
        sandbox = await self.js(
            f"(() => {{ const b = document.querySelector({what!r}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        at = {"x": sandbox[0], "y": sandbox[1], "button": "left", "clickCount": 1}
        await self.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.send("Input.dispatchMouseEvent", type="mouseReleased", **at)


@contextlib.asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Tab]:
    """A fresh browser with one empty tab."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, "there is no Chromium: apt-get install chromium"
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        port = await asyncio.to_thread(_port, profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = [one for one in await reply.json() if one["type"] == "page"]
            url = tabs[0]["webSocketDebuggerUrl"]
            async with http.ws_connect(url, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.send(f"{domain}.enable")
                yield tab
                await tab.send("Browser.close")  # with its children, which a signal leaves behind
                await tab.reader
        await asyncio.wait_for(process.wait(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _port(file: Path) -> int:
    """The port that the browser writes there once it listens."""
    late = time.monotonic() + 60
    while time.monotonic() < late:
        if file.exists() and (text := file.read_text()):
            return int(text.split()[0])
        time.sleep(0.05)
    msg = "Chromium did not start within a minute"
    raise TimeoutError(msg)
