"""Take the screenshot `docs/console.png`: the overview of a busy server, in a real Chromium.

The server has the sessions of the console's tests, with times spread over half an hour.

    python tools/docs/console_picture.py
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from browser.busy import fill  # noqa: E402 - the folder above
from browser.chromium import chromium  # noqa: E402
from support.server import TOKENS, serve  # noqa: E402
from tugline.server.store.base import Tx  # noqa: E402

WIDTH, HEIGHT = 1400, 757


def spread(tx: Tx) -> None:
    """Spread the times of events and sessions over half an hour."""
    for table, column, key in (("events", "created", "position"), ("sessions", "updated", "place")):
        [(first, last)] = tx.all(f"SELECT MIN({key}), MAX({key}) FROM {table}")  # noqa: S608 - constants
        change = f"UPDATE {table} SET {column} = :now - 50 - 1650.0 * (:last - {key}) / :span"  # noqa: S608 - constants
        tx.run(change, now=tx.now, last=last, span=last - first)


async def main(path: Path) -> None:
    """Fill a server as the tests of the console do, and take the screenshot."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            serve(f"sqlite:{folder / 'server.db'}", folder) as server,
            chromium(folder / "profile") as tab,
        ):
            await fill(server)
            await server.control.database.write(spread)
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            await tab.send("Emulation.setDeviceMetricsOverride", **size)
            await tab.visit(f"{server.url}/#token={TOKENS.read}")
            await tab.until("document.querySelector('.connection .live')")
            await tab.until("document.querySelector('.figure svg') && document.querySelector('tr')")
            await asyncio.to_thread(path.write_bytes, await tab.picture())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "console.png"))
