"""The stub engine: 24 tokens in an eighth of a second, whatever it is asked: ``engine.py PORT``.

They come in three pieces, so that the engine takes little of the cores that it shares here. It
serves token ids under the tokenizer of the demo's model, on the routes of the embedded engine.
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
        if len(prompt) < 16:  # the probe asks about short prompts
            return Reply([*prompt[:4].tolist(), *end])
        return Reply(answer, delay_s=0.005, tokens_per_chunk=8)

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=WINDOW, eos_ids=tuple(end)
    )
    async with serve(create_app(engine, model_name="stub"), port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
