"""MCP servers and skills reach the model through the real programs."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from conformance.session_run import Scenario, SessionRun, run_session
from tugline.cli.harness_check import cases_of
from tugline.testing import ScriptedTurn

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]
WITH_MCP = ["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"]
WITH_SKILLS = [*WITH_MCP, "pi"]
INSTRUCTION = "Say hello to the moon."
SERVER = """
import json, os, sys

TOOL = {
    "name": "phase_of_moon",
    "description": "Tells the phase of the moon.",
    "inputSchema": {"type": "object", "properties": {}},
}
WORDS = (sys.argv[1], os.environ.get("A", ""))
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    version = request.get("params", {}).get("protocolVersion")
    known = {
        "initialize": {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "moon", "version": "1"},
        },
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "waning " + " ".join(WORDS)}]},
    }
    answer = {"jsonrpc": "2.0", "id": request["id"], "result": known.get(request["method"], {})}
    print(json.dumps(answer), flush=True)
"""
SKILL = Path(__file__).with_name("SKILL.md").read_text()


async def run_scripted(
    name: str, folder: Path, *turns: ScriptedTurn, options: dict[str, Any] | None = None
) -> SessionRun:
    """One session of the real program with a script in its folder."""
    script = {INSTRUCTION: (*turns, ScriptedTurn("Hello."))}
    return await run_session(
        cases_of(name)[0], Scenario(script, {"server.py": SERVER}, options=options or {}), folder
    )


def request_text(ran: SessionRun, number: int) -> str:
    """The new messages and the tools that the recording has of a call, as JSON."""
    call = ran.calls[number]
    return msgspec.json.encode((call.messages, call.tools)).decode()


@pytest.mark.parametrize("name", WITH_MCP)
async def test_a_tool_of_an_mcp_server_is_offered_and_called(name: str, tmp_path: Path) -> None:
    """The first request names the tool, and the next one has the answer of the server.

    The server is started with its arguments and its environment.
    """
    moon = {"command": "python3", "args": ["server.py", "gibbous"], "env": {"A": "b c"}}
    options = {"mcp": {"moon": moon}}
    seen = await run_scripted(name, tmp_path / "asked", options=options)
    assert seen.exit.code == 0, seen.log
    assert "phase_of_moon" in request_text(seen, 0)
    if name == "qwen_code":  # Qwen Code calls MCP tools through a tool of its own
        call = ("tool_call", {"name": "mcp__moon__phase_of_moon", "arguments": {}})
    else:
        tools = [tool.name for tool in seen.calls[0].tools]
        call = (next(tool for tool in tools if tool.endswith("phase_of_moon")), {})
    ran = await run_scripted(
        name, tmp_path / "called", ScriptedTurn("", calls=(call,)), options=options
    )
    assert "waning gibbous b c" in request_text(ran, 1), ran.log[-2000:]


async def answer(request: web.Request) -> web.Response:
    """The same server over HTTP, one message at a time; it requires a token."""
    if request.headers.get("x-token") != "t1":
        return web.Response(status=401)
    message = await request.read()
    if b'"id"' not in message:
        return web.Response(status=202)
    line = (sys.executable, "-c", SERVER, "gibbous")
    done = await asyncio.create_subprocess_exec(*line, stdin=PIPE, stdout=PIPE)
    output, _ = await done.communicate(message)
    return web.Response(body=output, content_type="application/json")


@pytest.fixture
async def mcp_url() -> AsyncIterator[str]:
    """The URL of the server, which streams nothing."""
    app = web.Application()
    app.router.add_post("/mcp", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/mcp"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITH_MCP)
async def test_a_server_is_called_over_http_with_its_headers(
    name: str, mcp_url: str, tmp_path: Path
) -> None:
    """The requests to the server have the token in their headers."""
    options = {"mcp": {"moon": {"url": mcp_url, "headers": {"x-token": "t1"}}}}
    ran = await run_scripted(name, tmp_path, options=options)
    assert "phase_of_moon" in request_text(ran, 0), ran.log[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITH_SKILLS)
async def test_a_skill_is_announced(name: str, tmp_path: Path) -> None:
    """The skill's description is in the first request."""
    ran = await run_scripted(name, tmp_path, options={"skills": {"count-moons": SKILL}})
    assert ran.exit.code == 0, ran.log
    assert "How the moons of Zog are counted." in request_text(ran, 0)
    assert len(ran.calls) == 1
