"""An engine without a model in its own process: ``engine.py PORT TOKENIZER``.

Its answers depend on the prompt alone, so they are the same after every restart, and an answer
that the prompt has a part of is continued.
"""

import asyncio
import sys
import zlib
from pathlib import Path

import uvloop

from tugline.chat.tokenizer import Tokenizer
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine
from tugline.types import Ids
from tugline.web.serve import serve

WINDOW = 16_384


async def main(port: int, tokenizer: Tokenizer) -> None:
    """Serve until killed."""
    opening, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("<|im_end|>")

    def reply(prompt: Ids, _request: str) -> Reply:
        starts = (prompt == opening[0]).nonzero()[0]
        if not len(starts):  # a probe of the engine is no chat
            return Reply([*prompt[:4].tolist(), *end])
        begun = int(starts[-1]) + len(opening)
        dice = zlib.crc32(prompt[:begun].tobytes())
        answer = [*tokenizer.encode(f"answer {dice:x} {'so ' * (dice % 9)}"), *end]
        return Reply(answer[len(prompt) - begun :], delay_s=0.002 + dice % 5 * 0.003)

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=WINDOW, eos_ids=tuple(end)
    )
    app = create_app(engine, model_name="chaos")
    async with serve(app, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Tokenizer.load(Path(sys.argv[2]))))
