"""An engine that mends the toy's issues in every other session: ``swe_engine.py ROWS FILE``."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path

from tiny import tokenizer
from tugline.inference.server import create_app
from tugline.testing.scripted_engine import Reply, ScriptedEngine
from tugline.types import Ids
from tugline.web.serve import run, serve

DONE = "Done."
IDLE = "I look at it first.\n```sh\nls\n```"


async def main(rows: list[dict[str, str]], url_file: Path) -> None:
    """Serve until killed; FILE gets the URL."""
    words = tokenizer()
    end = words.encode("<|im_end|>")
    turns = {row["instance_id"]: itertools.cycle((True, False)) for row in rows}

    def reply(prompt: Ids, _request: str) -> Reply:
        text = words.decode(prompt.tolist())
        row = next((row for row in rows if row["problem_statement"].strip() in text), None)
        if row is None or "(exit 0)" in text:
            answer = DONE
        elif next(turns[row["instance_id"]]):
            answer = f"This mends it.\n```sh\ngit apply <<'PATCH'\n{row['patch']}PATCH\n```"
        else:
            answer = IDLE
        return Reply([*words.encode(answer), *end], tokens_per_chunk=64)

    engine = ScriptedEngine(reply, vocab_size=words.size, eos_ids=end)
    async with serve(create_app(engine, model_name="scripted")) as url:
        draft = url_file.with_suffix(".part")
        draft.write_text(url)
        draft.replace(url_file)
        await asyncio.Event().wait()


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    run(main([json.loads(line) for line in lines], Path(sys.argv[2])))
