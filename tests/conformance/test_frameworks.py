"""Agent frameworks against the gateway, as their manuals use them: turns with tools, all exact.

They are installed on first use, with everything that they need, into a folder of the cache that no
other program sees.
"""

import asyncio
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from rig import in_turn, rig
from tugline.errors import HarnessError
from tugline.harnesses.install import find_node, install_once, run_installer
from tugline.sandbox.cache import cache_folder
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


def calls(name: str, *arguments: dict[str, str]) -> str:
    """Tool calls as the model writes them."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments":  {json.dumps(each)}}}\n</tool_call>'
        for each in arguments
    )


async def install(kind: str, packages: bytes, *command: str | Path) -> Path:
    """The folder into which a command has installed these packages; on first use."""
    folder = cache_folder() / kind / hashlib.sha256(packages).hexdigest()[:12]

    async def fill(fresh: Path) -> None:
        (fresh / "package.json").write_text("{}")  # where npm installs
        print(f"installing {kind}, once ...", file=sys.__stderr__, flush=True)
        await run_installer(f"{kind} could not be installed", *map(str, command), cwd=fresh)

    folder.parent.mkdir(parents=True, exist_ok=True)
    await install_once(folder, fill)
    return folder


async def play(framework: Framework, *arguments: str) -> dict[str, Any]:
    """Run its script with no other package in sight; what it saw."""
    script = str(SCRIPTS / framework.script)
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    try:
        if framework.script.endswith(".mjs"):
            node, npm = find_node()
            options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
            install_sdk = (*npm, "install", *options, *AI_SDK)
            folder = await install("frameworks-npm", " ".join(AI_SDK).encode(), *install_sdk)
            argv = (str(node), script, str(folder))
        else:
            kind = f"frameworks-{sys.version_info.major}.{sys.version_info.minor}"
            folder = await install(kind, REQUIREMENTS.read_bytes(), *PIP)
            env |= {"PYTHONPATH": f"{folder}{os.pathsep}{SCRIPTS / 'shared'}", **QUIET}
            argv = (sys.executable, "-S", "-P", script)
    except HarnessError as error:
        pytest.skip(f"the frameworks cannot be installed: {error}")
    process = await asyncio.create_subprocess_exec(
        *argv,
        *arguments,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(240):
            told, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-3000:]
    seen: dict[str, Any] = json.loads(told.splitlines()[-1])
    return seen


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
    both, one = calls("read", {"path": "a.py"}, {"path": "b.py"}), calls("read", {"path": "c.py"})
    think = "<think>\nHm, ä. It is a file.\n</think>\n\n"
    turns = [f"{think}I look.\n{both}", f"{think}{one}", "Done."]
    if framework.only_calls:  # the gateway begins each of them
        end = calls("final_answer", {"answer": "Done."})
        turns = [turn.removeprefix('<tool_call>\n{"name": "') for turn in (both, one, end)]
    play_all = in_turn(*turns)
    async with rig(tmp_path, play_all) as it:
        seen = await play(framework, it.url, it.key, api, how)
        recorded, sampled = it.calls, it.sampled
    assert seen["text"] == "Done."
    assert sorted(seen["read"]) == ["a.py", "b.py", "c.py"]  # parallel calls run at once
    edited = Branch.HISTORY_EDITED if framework.only_calls else None
    assert [call.branch for call in recorded] == [None, edited, edited]
    assert [call.dialect for call in recorded] == [api] * 3
    assert sum(len(call.sampled_ids) for call in recorded) == sampled
    for before, after in itertools.pairwise(() if edited else recorded):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
