"""Take the screenshot `docs/training.png`: the page of a real training whose grader breaks.

The training is that of `tests/browser/test_questions.py`, a few minutes on two CPU cores. It is
made below FOLDER, if it is not there.

    python tools/docs/training_picture.py FOLDER
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from browser.chromium import chromium  # noqa: E402 - the folder above
from browser.test_questions import write_files  # noqa: E402

TUGLINE = Path(sys.executable).with_name("tugline")
WIDTH, HEIGHT = 1400, 1030
RUN = "runs/first"


def train(folder: Path) -> None:
    """Make the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder)
    argv = [TUGLINE, "train", "train.yaml", "--out", RUN, "--no-console"]
    subprocess.run(argv, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


async def take(link: str, path: Path) -> None:
    """Take the screenshot of the whole run."""
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(Path(profile)) as tab:
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            await tab.send("Emulation.setDeviceMetricsOverride", **size)
            await tab.visit(link)
            await tab.visit(f"{link.partition('/runs#')[0]}/training?smooth=0.6")
            await tab.until("document.querySelectorAll('figure path.line').length > 10")
            await asyncio.to_thread(path.write_bytes, await tab.picture())


def main(folder: Path) -> None:
    """Make the run if it is missing, serve its console, and take the screenshot."""
    if not (folder / RUN).exists():
        train(folder)
    argv = [TUGLINE, "up", "--dir", RUN, "--port", "0"]
    server = subprocess.Popen(argv, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        found = (re.search(r"the console is at (\S+)", line) for line in server.stderr or ())
        link = next(match[1] for match in found if match)
        asyncio.run(take(link, ROOT / "docs" / "training.png"))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
