"""Agent frameworks against the gateway, as in their manuals: turns with tools, all exact.

They are installed on first use, with everything that they need, into a folder of the cache that no
other program sees.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conformance.programs import CALLS, THINKS, exact, install, run, run_on_node
from support.engine import RENDERING, Play, reply_in_turn
from support.gateway import open_session
from tugline.errors import HarnessError
from tugline.testing import Reply
from tugline.types import Branch, CallOutcome, Ids

pytestmark = [pytest.mark.harness, pytest.mark.nightly, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).with_name("frameworks")
AI_SDK = (
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "@ai-sdk/google@4.0.121",
    "zod@4.6.7",
)
PIP = (
    *(sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", "--no-deps"),
    *("--target", ".", "-r"),
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
    streamed: tuple[bool, ...] = (False, True)
    requirements: str = "requirements.txt"


FRAMEWORKS = (
    Framework("openai_agents.py", (CHAT, RESPONSES)),
    Framework("pydantic_ai.py", (CHAT, RESPONSES, ANTHROPIC, GOOGLE)),
    Framework("langgraph.py", (CHAT, RESPONSES, ANTHROPIC)),
    Framework("litellm.py", (CHAT, ANTHROPIC, GOOGLE)),
    Framework("smolagents.py", (CHAT,), only_calls=True),
    Framework("llama_index.py", (CHAT, RESPONSES)),
    Framework("google_genai.py", (GOOGLE,)),
    Framework("deepagents.py", (CHAT,)),
    Framework("agent_framework.py", (CHAT, RESPONSES)),
    Framework("llm.py", (CHAT,)),
    Framework("strands.py", (CHAT,), streamed=(True,), requirements="requirements-crewai.txt"),
    Framework("crewai.py", (CHAT,), requirements="requirements-crewai.txt"),
    Framework("ai_sdk.mjs", (CHAT, RESPONSES, ANTHROPIC, GOOGLE)),
)
SCRIPTS_THAT_RETRY = ("deepagents.py", "agent_framework.py", "strands.py", "crewai.py", "llm.py")
RETRYING = [framework for framework in FRAMEWORKS if framework.script in SCRIPTS_THAT_RETRY]
GOING_ON = [framework for framework in RETRYING if framework.script != "llm.py"]
"""Without llm, which raises `JSONDecodeError` for arguments that are not JSON."""


def call(name: str, **arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def play(framework: Framework, sessions: Sequence[tuple[str, str, str, bool]]) -> Any:
    """Run its script with no other packages: an agent for each (url, key, api, streamed).

    Return what each agent reports.
    """
    script, argument = SCRIPTS / framework.script, json.dumps(sessions)
    if framework.script.endswith(".mjs"):
        return await run_on_node("frameworks-npm", AI_SDK, script, argument)
    kind = f"frameworks-{sys.version_info.major}.{sys.version_info.minor}"
    requirements = SCRIPTS / framework.requirements
    folder = await install(kind, requirements.read_bytes(), *PIP, requirements)
    path = f"{folder}{os.pathsep}{SCRIPTS / 'shared'}"
    return await run([sys.executable, "-S", "-P", script, argument], PYTHONPATH=path, **QUIET)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: Path(framework.script).stem)
async def test_three_turns_with_tools(tmp_path: Path, framework: Framework) -> None:
    """Reasoning, text and parallel calls come back unchanged; each token is counted once."""
    one = call("read", path="c.py")
    turns = [THINKS, f"<think>\nHm.\n</think>\n\n{one}", "Done."]
    if framework.only_calls:  # the gateway forces the beginning of each call
        turns = [CALLS, one, call("final_answer", answer="Done.")]
        turns = [turn.removeprefix('<tool_call>\n{"name": "') for turn in turns]
    edited = Branch.HISTORY_EDITED if framework.only_calls else None
    kinds = [(api, streamed) for api in framework.apis for streamed in framework.streamed]
    async with contextlib.AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(
                open_session(tmp_path / str(number), reply_in_turn(*turns))
            )
            for number in range(len(kinds))
        ]
        sessions = [
            (session.url, session.key, *kind) for session, kind in zip(opened, kinds, strict=True)
        ]
        try:
            reports = await play(framework, sessions)
        except HarnessError as error:
            pytest.skip(f"the frameworks cannot be installed: {error}")
        results = {
            kind: (seen["text"], sorted(seen["read"]), session.calls, session.sampled)
            for kind, seen, session in zip(kinds, reports, opened, strict=True)
        }
    for kind, (text, paths, recorded, sampled) in results.items():
        assert (kind, text, paths) == (kind, "Done.", ["a.py", "b.py", "c.py"])
        branches = [(call.branch, call.dialect) for call in recorded]
        assert branches == [(branch, kind[0]) for branch in (None, edited, edited)]
        assert sum(len(call.sampled_ids) for call in recorded) == sampled
        assert edited or exact(recorded), kind


async def run_streamed(framework: Framework, folder: Path, play_turns: Play) -> tuple[Any, Any]:
    """One streamed session over Chat Completions; return the framework's report and the calls."""
    async with open_session(folder, play_turns) as session:
        try:
            (report,) = await play(framework, [(session.url, session.key, CHAT, True)])
        except HarnessError as error:
            pytest.skip(f"the frameworks cannot be installed: {error}")
        return report, session.calls


@pytest.mark.parametrize("framework", GOING_ON, ids=lambda framework: Path(framework.script).stem)
async def test_a_malformed_call_does_not_end_the_session(
    tmp_path: Path, framework: Framework
) -> None:
    """The agent gets the call with the arguments as they were sampled, and goes on."""
    good = call("read", path="a.py")
    bad = good.replace("}}", ', "limit": oops}}')
    turns = reply_in_turn(f"I look.\n{good}", f"Again.\n{bad}", f"Now.\n{good}", "Done.")
    report, calls = await run_streamed(framework, tmp_path, turns)
    assert report["text"] == "Done."
    assert [each.branch for each in calls] == [None] * 4
    assert exact(calls)


@pytest.mark.parametrize("framework", RETRYING, ids=lambda framework: Path(framework.script).stem)
@pytest.mark.parametrize(
    "refusal", [Reply(status=503), Reply(status=429, retry_after_s=1.0)], ids=["503", "429"]
)
async def test_a_busy_engine_is_asked_again(
    tmp_path: Path, framework: Framework, refusal: Reply
) -> None:
    """More refusals than the gateway's own tries reach the client as a status, which it retries."""
    turns = reply_in_turn(f"I look.\n{call('read', path='a.py')}", "Done.")
    refusals = [refusal] * 5

    def reply(prompt: Ids, request: str) -> Reply:
        answered = "a.py is there" in RENDERING.tokenizer.decode(prompt.tolist())
        return refusals.pop() if answered and refusals else turns(prompt, request)

    report, calls = await run_streamed(framework, tmp_path, reply)
    assert report["text"] == "Done."
    complete = [each for each in calls if each.outcome is CallOutcome.COMPLETE]
    assert [each.branch for each in complete] == [None, None]
