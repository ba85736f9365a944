"""The official JavaScript SDKs against the gateway: most CLIs are built on one of them."""

import itertools
import json
from pathlib import Path

import pytest

from conformance.programs import THINKS, exact, run_on_node
from support.engine import reply_in_turn, reply_with
from support.gateway import open_session
from support.polling import until
from tugline.testing import Reply
from tugline.types import CallOutcome, Ids

SDKS = ("openai@7.55.0", "@anthropic-ai/sdk@1.11.0", "@google/genai@3.1.0")
PROGRAM = Path(__file__).with_name("npm") / "sdk.mjs"


@pytest.mark.pi
@pytest.mark.parametrize("api", ["openai_chat", "openai_responses", "anthropic", "google"])
async def test_an_agent_on_a_javascript_sdk(tmp_path: Path, api: str) -> None:
    """Streams, parallel tools, counts, models, a refused key and a hang-up work in one session.

    It is one scenario, since the program runs in one process of Node.
    """
    turns, asked = reply_in_turn(THINKS, THINKS, THINKS, "Done."), itertools.count()

    def play(prompt: Ids, request: str) -> Reply:
        slow = reply_with("word " * 2000, delay_s=0.05)  # the client hangs up during this answer
        return (turns if next(asked) < 4 else slow)(prompt, request)

    async with open_session(tmp_path, play) as session:
        seen = await run_on_node("npm-sdks", SDKS, PROGRAM, api, session.url, session.key)
        await until(lambda: not session.running and len(session.calls) >= 5, 5)
        calls = session.calls
    *others, last = seen["turns"]
    arguments = [{"path": "a.py"}, {"path": "b.py"}]
    for turn in others:
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
    assert exact(calls[:4])
    assert any("scripted" in name for name in seen["models"])
    assert seen["refused"]["status"] == 401
    assert calls[4].outcome is CallOutcome.CLIENT_GONE
    if api in {"anthropic", "google"}:
        assert seen["counted"] > 0
