"""The real gateway in its own process, controlled by lines on its standard input.

``open N`` opens N sessions and answers with a JSON list of ``[path, key, recording, port]``;
``close`` closes all of them and answers ``{}``; ``watch`` starts to measure stalls of the event
loop and ``stalls`` answers with the longest one, in wall-clock ms and in CPU ms of the thread;
``pids`` lists the gateway's processes. It prints ``{"port": N}`` when it is up and exits when the
input closes.

    python launcher.py exact|observed ENGINE_URL TOKENIZER_FOLDER RECORDINGS_FOLDER
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from tugline import log
from tugline.chat.engines.base import EngineFormat
from tugline.chat.engines.chat import VllmChat
from tugline.chat.engines.generate import VllmGenerate
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.launch.garbage import managed_gc
from tugline.types import PluginSpec, Sampling, Session, Task
from tugline.web.serve import raise_file_limit

TASK = Task(
    id="bench",
    instruction="",
    harness=PluginSpec("shell"),
    evaluator=PluginSpec("session_completed"),
    sampling=Sampling(temperature=1.0, top_p=1.0),
)


def respond(value: object) -> None:
    """Print one line of JSON for the parent process."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class StallMonitor:
    """Measures stalls of the event loop with a timer of one millisecond."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wall = self._cpu = 0.0
        self._at, self._used = time.monotonic(), time.thread_time()
        self._timer = self._loop.call_later(0.001, self._tick)

    def _tick(self) -> None:
        now, used = time.monotonic(), time.thread_time()
        self._wall = max(self._wall, now - self._at - 0.001)
        self._cpu = max(self._cpu, used - self._used)
        self._at, self._used = time.monotonic(), used
        self._timer = self._loop.call_later(0.001, self._tick)

    def stop(self) -> dict[str, float]:
        """Stop; return the longest stall in ms. CPU time excludes other programs on the machine."""
        self._timer.cancel()
        return {"wall": self._wall * 1000, "cpu": self._cpu * 1000}


async def main(mode: str, engine: str, tokenizer: Path, folder: Path) -> None:
    """Serve until the standard input closes."""
    log.configure()  # to stderr: the parent reads stdout
    numbers = itertools.count()
    wire: EngineFormat = VllmChat() if mode == "observed" else VllmGenerate()
    rendering = None if mode == "observed" else Rendering(Tokenizer.load(tokenizer), "qwen3")
    upstream = Upstream(engine, wire)
    raise_file_limit()
    async with Gateway(upstream, rendering, folder) as gateway, managed_gc(lambda: gateway.idle):
        respond({"port": urlsplit(gateway.url).port})
        async with contextlib.AsyncExitStack() as opened:
            while line := await asyncio.to_thread(sys.stdin.readline):
                command, _, count = line.strip().partition(" ")
                if command == "close":
                    await opened.aclose()
                    respond({})
                    continue
                if command == "pids":
                    respond([os.getpid()])
                    continue
                if command == "watch":
                    monitor = StallMonitor()
                    respond({})
                    continue
                if command == "stalls":
                    respond(monitor.stop())
                    continue
                sessions = []
                for _ in range(int(count)):
                    session = Session(id=f"bench-{next(numbers)}", task=TASK.id, sample=0)
                    access = await opened.enter_async_context(gateway.open(session, TASK))
                    url = urlsplit(access.base_url)
                    recording = str(gateway.recording_path(session))
                    sessions.append([url.path, access.key, recording, url.port])
                respond(sessions)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
