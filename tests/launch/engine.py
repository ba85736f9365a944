"""An engine without a model as a process of its own: ``engine.py FILE``, which gets its URL."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvloop

from tiny import tokenizer
from tugline.inference.server import create_app
from tugline.testing import Reply, ScriptedEngine
from tugline.web.serve import serve


def create_engine(name: str = "scripted") -> Any:
    """An engine that always says "so be it", to be served."""
    words = tokenizer()
    answer, end = words.encode("so be it"), words.encode("<|im_end|>")
    engine = ScriptedEngine(
        lambda _prompt, _request: Reply([*answer, *end], tokens_per_chunk=4),
        vocab_size=words.size,
        eos_ids=end,
    )
    return create_app(engine, model_name=name)


async def main(url_file: Path) -> None:
    """Serve until killed."""
    async with serve(create_engine()) as url:
        draft = url_file.with_suffix(".part")
        draft.write_text(url)
        draft.replace(url_file)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
