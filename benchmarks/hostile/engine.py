"""The stub engine (``engine.py PORT``): it answers every request with the same 24 tokens in 125 ms.

They are sent in three chunks, so that the engine needs little CPU time of the shared cores. It has
the routes of the embedded engine, and the ids are those of the demo model's tokenizer.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import sys
from importlib.resources import files
from pathlib import Path

import uvloop

from tugline.chat.tokenizer import Tokenizer
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids
from tugline.web.serve import serve

MODEL = Path(str(files("tugline.demo"))) / "warm_start_model"
WINDOW = 16_384


async def main(port: int) -> None:
    """Serve until killed."""
    tokenizer = Tokenizer.load(MODEL / "tokenizer.json")
    end = tokenizer.encode("<|im_end|>")
    answer = [*tokenizer.encode("I have looked at it, and it is fine. " * 9)[:23], *end]

    def reply(prompt: Ids, _request: str) -> Reply:
        if len(prompt) < 16:  # the probe of the gateway has short prompts
            return Reply([*prompt[:4].tolist(), *end])
        return Reply(answer, delay_s=0.005, tokens_per_chunk=8)

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=WINDOW, eos_ids=tuple(end)
    )
    async with serve(create_app(engine, model_name="stub"), port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
