"""The official JavaScript SDKs against the gateway: most CLIs are built on one of them."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rig import Play, in_turn, rig, says
from tugline.harnesses.install import find_node, install_once, run_installer
from tugline.sandbox.cache import cache_folder
from tugline.testing import Reply
from tugline.types import CallOutcome, Ids

SDKS = ("openai@7.55.0", "@anthropic-ai/sdk@1.11.0", "@google/genai@3.1.0")
PROGRAM = Path(__file__).with_name("npm") / "sdk.mjs"
CALLS = "".join(
    f'<tool_call>\n{{"name": "read", "arguments": {{"path":  "{path}"}}}}\n</tool_call>\n'
    for path in ("a.py", "b.py")
).rstrip()
THINKS = f"<think>\nHm, ä. It is a file.\n</think>\n\nI look.\n{CALLS}"
GONE_S = 5.0


async def install() -> tuple[Path, Path]:
    """Node, and the folder that has the SDKs; downloaded on first use."""
    node, npm = find_node()
    folder = cache_folder() / "npm-sdks" / "-".join(sdk.rpartition("@")[2] for sdk in SDKS)

    async def fill(fresh: Path) -> None:
        (fresh / "package.json").write_text("{}")
        options = ("--no-audit", "--no-fund", "--loglevel=error")
        await run_installer("npm could not install", *npm, "install", *options, *SDKS, cwd=fresh)

    folder.parent.mkdir(parents=True, exist_ok=True)
    await install_once(folder, fill)
    return node, folder


async def play(api: str, url: str, key: str) -> dict[str, Any]:
    """Run the program; what it saw."""
    node, folder = await install()
    process = await asyncio.create_subprocess_exec(
        str(node), str(PROGRAM), str(folder), api, url, key,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            told, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-2000:]
    seen: dict[str, Any] = json.loads(told)
    return seen


def then_slowly(first: Play) -> Play:
    """Four answers as `first` gives them, then one that takes minutes."""
    asked = itertools.count()

    def reply(prompt: Ids, request: str) -> Reply:
        play = first if next(asked) < 4 else says("word " * 2000, delay_s=0.05)
        return play(prompt, request)

    return reply


@pytest.mark.pi
@pytest.mark.parametrize("api", ["openai_chat", "openai_responses", "anthropic", "google"])
async def test_an_agent_on_a_javascript_sdk(tmp_path: Path, api: str) -> None:
    """Streams, parallel tools, counts, models, a refused key and a hang-up; one exact sequence."""
    plays = then_slowly(in_turn(THINKS, THINKS, THINKS, "Done."))
    async with rig(tmp_path, plays) as it:
        seen = await play(api, it.url, it.key)
        async with asyncio.timeout(GONE_S):
            while it.running or len(it.calls) < 5:  # noqa: ASYNC110 - other processes' doing
                await asyncio.sleep(0.02)
        calls = it.calls
    *turns, last = seen["turns"]
    arguments = [{"path": "a.py"}, {"path": "b.py"}]
    for turn in turns:
        assert [json.loads(call) for call in turn["calls"]] == arguments
        assert (turn["text"].strip(), turn["thought"].strip()) == (
            "I look.",
            "Hm, ä. It is a file.",
        )
    assert (last["text"].strip(), last["calls"]) == ("Done.", [])
    assert seen["first"] >= 4, "text came in deltas"
    for turn, call in zip(seen["turns"], calls, strict=False):
        cached = 0 if api != "anthropic" else len(call.prompt_ids) - turn["input"]
        assert turn["input"] + cached == len(call.prompt_ids)
        assert turn["output"] == len(call.sampled_ids)
    for before, after in itertools.pairwise(calls[:4]):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
    assert any("scripted" in name for name in seen["models"])
    assert seen["refused"]["status"] == 401
    assert calls[4].outcome is CallOutcome.CLIENT_GONE
    if api in {"anthropic", "google"}:
        assert seen["counted"] > 0
