"""The real gateway as a process of its own, steered line by line over its standard input.

``open N`` opens N sessions and answers with a JSON list of ``[path, key, recording]``; ``close``
closes every open one and answers ``{}``. Prints ``{"port": N}`` when it is up and ends when the
input closes.

    python launcher.py exact|observed ENGINE_URL TOKENIZER_FOLDER RECORDINGS_FOLDER
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tugline.chat.engines.base import EngineFormat
from tugline.chat.engines.vllm import VllmChat, VllmGenerate
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.types import PluginSpec, Sampling, Session, Task
from tugline.web.serve import freeze_gc, run

TASK = Task(
    id="bench",
    instruction="",
    harness=PluginSpec("shell"),
    evaluator=PluginSpec("session_completed"),
    sampling=Sampling(temperature=1.0, top_p=1.0),
)


def say(value: object) -> None:
    """One line of JSON to whoever started this."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(mode: str, engine: str, tokenizer: Path, folder: Path) -> None:
    """Serve until the standard input closes."""
    numbers = itertools.count()
    wire: EngineFormat = VllmGenerate() if mode == "exact" else VllmChat()
    rendering = Rendering(Tokenizer.load(tokenizer), "qwen3") if mode == "exact" else None
    async with Gateway(Upstream(engine, wire), rendering, folder) as gateway:
        freeze_gc()
        say({"port": urlsplit(gateway.url).port})
        async with contextlib.AsyncExitStack() as opened:
            while line := await asyncio.to_thread(sys.stdin.readline):
                word, _, count = line.strip().partition(" ")
                if word == "close":
                    await opened.aclose()
                    say({})
                    continue
                sessions = []
                for _ in range(int(count)):
                    session = Session(id=f"bench-{next(numbers)}", task=TASK.id, sample=0)
                    access = await opened.enter_async_context(gateway.open(session, TASK))
                    path = urlsplit(access.base_url).path
                    sessions.append([path, access.key, str(gateway.recording_path(session))])
                say(sessions)


if __name__ == "__main__":
    run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
