"""Agent frameworks against the gateway, as in their manuals: turns with tools, all exact.

They are installed on first use, with everything that they need, into a folder of the cache that no
other program sees.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conformance.programs import CALLS, THINKS, exact, install, run, run_on_node
from rig import in_turn, rig
from tugline.errors import HarnessError
from tugline.types import Branch

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).with_name("frameworks")
REQUIREMENTS = SCRIPTS / "requirements.txt"
AI_SDK = (
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "@ai-sdk/google@4.0.121",
    "zod@4.6.7",
)
PIP = (
    *(sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", "--no-deps"),
    *("--target", ".", "-r", REQUIREMENTS),
)
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "1", "HF_HUB_OFFLINE": "1"}
CHAT, RESPONSES, ANTHROPIC, GOOGLE = "openai_chat", "openai_responses", "anthropic", "google"


class Framework(NamedTuple):
    """A script in `SCRIPTS`, and the APIs that it speaks."""

    script: str
    apis: tuple[str, ...]
    only_calls: bool = False
    """Whether every answer must be a tool call (``tool_choice: required``), the last one of
    ``final_answer``, and each call goes back as text of the framework's own."""


FRAMEWORKS = (
    Framework("openai_agents.py", (CHAT, RESPONSES)),
    Framework("pydantic_ai.py", (CHAT, RESPONSES, ANTHROPIC, GOOGLE)),
    Framework("langgraph.py", (CHAT, RESPONSES, ANTHROPIC)),
    Framework("litellm.py", (CHAT, ANTHROPIC, GOOGLE)),
    Framework("smolagents.py", (CHAT,), only_calls=True),
    Framework("llama_index.py", (CHAT, RESPONSES)),
    Framework("google_genai.py", (GOOGLE,)),
    Framework("ai_sdk.mjs", (CHAT, RESPONSES, ANTHROPIC, GOOGLE)),
)


def call(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def play(framework: Framework, *arguments: str) -> Any:
    """Run its script with no other packages; return its report."""
    script = SCRIPTS / framework.script
    if framework.script.endswith(".mjs"):
        return await run_on_node("frameworks-npm", AI_SDK, script, *arguments)
    kind = f"frameworks-{sys.version_info.major}.{sys.version_info.minor}"
    folder = await install(kind, REQUIREMENTS.read_bytes(), *PIP)
    path = f"{folder}{os.pathsep}{SCRIPTS / 'shared'}"
    return await run([sys.executable, "-S", "-P", script, *arguments], PYTHONPATH=path, **QUIET)


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("framework", "api"),
    [(framework, api) for framework in FRAMEWORKS for api in framework.apis],
    ids=lambda value: value if isinstance(value, str) else value.script.partition(".")[0],
)
async def test_three_turns_with_tools(
    tmp_path: Path, framework: Framework, api: str, how: str
) -> None:
    """Reasoning, text and parallel calls come back unchanged; each token is counted once."""
    one = call("read", path="c.py")
    turns = [THINKS, f"<think>\nHm.\n</think>\n\n{one}", "Done."]
    if framework.only_calls:  # the gateway begins each of them
        turns = [CALLS, one, call("final_answer", answer="Done.")]
        turns = [turn.removeprefix('<tool_call>\n{"name": "') for turn in turns]
    async with rig(tmp_path, in_turn(*turns)) as it:
        try:
            seen = await play(framework, it.url, it.key, api, how)
        except HarnessError as error:
            pytest.skip(f"the frameworks cannot be installed: {error}")
        recorded, sampled = it.calls, it.sampled
    assert seen["text"] == "Done."
    assert sorted(seen["read"]) == ["a.py", "b.py", "c.py"]  # parallel calls run at once
    edited = Branch.HISTORY_EDITED if framework.only_calls else None
    assert [call.branch for call in recorded] == [None, edited, edited]
    assert [call.dialect for call in recorded] == [api] * 3
    assert sum(len(call.sampled_ids) for call in recorded) == sampled
    assert edited or exact(recorded)
