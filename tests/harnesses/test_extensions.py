"""MCP servers and skills reach the model through the real programs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.session_run import Scenario, SessionRun, run_session
from tugline.cli.harness_check import CASES
from tugline.testing import ScriptedTurn

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]
ONE_EACH = {case.harness: case for case in reversed(CASES)}
WITH_MCP = ["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"]
WITH_SKILLS = [*WITH_MCP, "pi"]
INSTRUCTION = "Say hello to the moon."
SERVER = """
import json, sys

TOOL = {
    "name": "phase_of_moon",
    "description": "Tells the phase of the moon.",
    "inputSchema": {"type": "object", "properties": {}},
}
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
        "tools/call": {"content": [{"type": "text", "text": "waning " + sys.argv[1]}]},
    }
    answer = {"jsonrpc": "2.0", "id": request["id"], "result": known.get(request["method"], {})}
    print(json.dumps(answer), flush=True)
"""
SKILL = """\
---
name: count-moons
description: How the moons of Zog are counted.
---
Count them twice.
"""


async def run_scripted(
    name: str, folder: Path, *turns: ScriptedTurn, options: dict[str, Any] | None = None
) -> SessionRun:
    """One session of the real program with a script in its folder."""
    script = {INSTRUCTION: (*turns, ScriptedTurn("Hello."))}
    return await run_session(
        ONE_EACH[name], Scenario(script, {"server.py": SERVER}, options=options or {}), folder
    )


def request_text(ran: SessionRun, number: int) -> str:
    """The new messages and the tools that the recording has of a call, as JSON."""
    call = ran.calls[number]
    return msgspec.json.encode((call.messages, call.tools)).decode()


@pytest.mark.parametrize("name", WITH_MCP)
async def test_a_tool_of_an_mcp_server_is_offered_and_called(name: str, tmp_path: Path) -> None:
    """The first request names it; what the server answers stands in the next one."""
    moon = {"command": "python3", "args": ["server.py", "gibbous"], "env": {"A": "b"}}
    options = {"mcp": {"moon": moon}}
    seen = await run_scripted(name, tmp_path / "asked", options=options)
    assert seen.exit.code == 0, seen.log
    assert "phase_of_moon" in request_text(seen, 0)
    if name == "qwen_code":  # it tells of the tool, and calls it through one of its own
        call = ("tool_call", {"name": "mcp__moon__phase_of_moon", "arguments": {}})
    else:
        tools = [tool.name for tool in seen.calls[0].tools]
        call = (next(tool for tool in tools if tool.endswith("phase_of_moon")), {})
    ran = await run_scripted(
        name, tmp_path / "called", ScriptedTurn("", calls=(call,)), options=options
    )
    assert "waning gibbous" in request_text(ran, 1), ran.log[-2000:]


class Moon(BaseHTTPRequestHandler):
    """The same server over HTTP, for those who know the token."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One message, one answer."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["x-token"] != "t1":
            self.answer(401, b"")
        elif "id" not in request:
            self.answer(202, b"")
        else:
            line = [sys.executable, "-c", SERVER, "gibbous"]
            done = subprocess.run(
                line, input=json.dumps(request).encode(), capture_output=True, check=True
            )
            self.answer(200, done.stdout)

    def do_GET(self) -> None:
        """Nothing is streamed."""
        self.answer(405, b"")

    def answer(self, status: int, body: bytes) -> None:
        """A whole reply."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def far() -> Iterator[str]:
    """Where it is."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Moon) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", WITH_MCP)
async def test_a_server_is_called_over_http_with_its_headers(
    name: str, far: str, tmp_path: Path
) -> None:
    """Without the token it would tell nothing."""
    options = {"mcp": {"moon": {"url": far, "headers": {"x-token": "t1"}}}}
    ran = await run_scripted(name, tmp_path, options=options)
    assert "phase_of_moon" in request_text(ran, 0), ran.log[-2000:]


@pytest.mark.parametrize("name", WITH_SKILLS)
async def test_a_skill_is_announced(name: str, tmp_path: Path) -> None:
    """Its description, which is what the model chooses by, is in the first request."""
    ran = await run_scripted(name, tmp_path, options={"skills": {"count-moons": SKILL}})
    assert ran.exit.code == 0, ran.log
    assert "How the moons of Zog are counted." in request_text(ran, 0)
    assert len(ran.calls) == 1
