"""``tugline top``: what it shows of a real server with a real node."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from observed import CALL, Observed, observed, task, until
from served import TOKENS
from tugline.cli.top import Overview, Watcher, _is_shown, screen
from tugline.client.api import Client
from tugline.errors import ServerError
from tugline.protocol import NodeRegistration, NodeState
from tugline.server.app import create_app, serve_api

TUGLINE = Path(sys.executable).with_name("tugline")
SLOW = f"{CALL}\nimport time; time.sleep(30)"
STRAGGLER = f"{CALL}\nimport os, time\nwhile 'g-2.' in os.getcwd():\n    time.sleep(0.1)\n"
"""The third sample of the group never ends."""


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Observed, str]]:
    """Server and node, with the API at an address."""
    async with observed(folder) as rig:
        app = create_app(rig.control, TOKENS, rig.pages)
        rig.pages.waiting = lambda: app.waiting
        async with serve_api(app) as url:
            yield rig, url


def drawn(seen: Overview) -> str:
    """The screen as plain text."""
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(screen(seen))
    return console.file.getvalue()  # type: ignore[attr-defined]


async def command(url: str, *options: str) -> tuple[int, str, str]:
    """The program, to its end."""
    program = await asyncio.create_subprocess_exec(
        TUGLINE,
        "top",
        *options,
        env={**os.environ, "TUGLINE_SERVER": url, "TUGLINE_TOKEN": TOKENS.read},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(program.communicate(), 30)
    return program.returncode or 0, out.decode(), err.decode()


async def test_it_shows_what_there_is(tmp_path: Path) -> None:
    """Queue by tenant, stages of the node, a straggler, a failure, rates; with a read token."""
    async with served(tmp_path) as (rig, url), Client(url, TOKENS.read) as client:
        await rig.run(task("bad", "exit(3)"))
        await rig.control.submit([task("g", STRAGGLER, samples=3)])
        await until(lambda: rig.node.stats.committed == 3)
        await rig.control.submit([task("long", SLOW, samples=9, tenant="other")])
        await until(lambda: rig.node.stages.pools["run"].busy == 2)
        await asyncio.sleep(0.1)
        watcher = Watcher(client)
        first, seen = await watcher.look(), await watcher.look()
        text = drawn(seen)
    assert first.sessions_per_minute == seen.sessions_per_minute == 3, "nothing is counted twice"
    assert seen.queue["other"] > 0
    assert [one.id for one in seen.stragglers] == ["g"]
    assert seen.stragglers[0].counts["completed"] == 2
    assert seen.failures[0].session == "bad-0"
    assert seen.failures[0].why == "failed harness"
    assert seen.failures[1].why.startswith("again: harness: ")
    assert seen.tokens_per_second > 0
    (line,) = seen.nodes
    assert line.node.name == "here"
    assert sum(line.stages.values()) == line.node.running > 0
    assert 0 < line.lease_s <= 30
    for shown in (url, "here", "other", "bad-0", "2 of 3", "sessions/min"):
        assert shown in text, text


async def test_once_and_as_json(tmp_path: Path) -> None:
    """The program prints one screen, or one object, and ends."""
    async with served(tmp_path) as (rig, url):
        await rig.run(task("a"))
        shown, printed = await asyncio.gather(command(url, "--once"), command(url, "--json"))
    for code, _, err in (shown, printed):
        assert (code, err) == (0, "")
    assert "\x1b" not in shown[1]
    assert "completed 1" in shown[1]
    told: dict[str, Any] = json.loads(printed[1])
    assert told["counts"]["sessions"] == {"completed": 1}
    assert told["nodes"][0]["node"]["name"] == "here"


async def test_a_lost_node_is_shown_for_a_while(tmp_path: Path) -> None:
    """It is marked; those that were lost long ago are left out."""
    async with served(tmp_path) as (rig, url), Client(url, TOKENS.read) as client:
        await rig.control.register(NodeRegistration(name="old", slots=1, capacity=1))
        await rig.control.register(NodeRegistration(name="old", slots=1, capacity=1))
        seen = await Watcher(client).look()
        states = sorted((one.node.name, one.node.state.value) for one in seen.nodes)
        assert states == [("here", "live"), ("old", "gone"), ("old", "live")]
        lost = next(one.node for one in seen.nodes if one.node.state is NodeState.GONE)
    assert not _is_shown(lost, lost.deadline + 601)


async def test_without_a_server_it_says_so() -> None:
    """One line, no traceback."""
    code, out, err = await command("http://127.0.0.1:9", "--once")
    assert code == 1
    assert out == ""
    assert err.startswith("tugline: the server at http://127.0.0.1:9 cannot be reached")
    assert err.count("\n") == 1


async def test_on_a_terminal_it_goes_on_until_interrupted(tmp_path: Path) -> None:
    """It shows what changes, and Ctrl-C is how it is left."""
    async with served(tmp_path) as (rig, url):
        ours, theirs = pty.openpty()
        program = await asyncio.create_subprocess_exec(
            TUGLINE,
            *("top", "--every", "0.2", "--server", url, "--token", TOKENS.read),
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        shown = b""

        def has(text: bytes) -> bool:
            nonlocal shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(ours, 1 << 16)
            return text in shown

        try:
            await until(lambda: has(b"nothing yet"))
            await rig.run(task("a"))
            await until(lambda: has(b"completed 1"))
            program.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(program.wait(), 10) == 0
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
            os.close(ours)


async def test_a_wrong_token_is_told(tmp_path: Path) -> None:
    """It is no reason to try again."""
    async with served(tmp_path) as (_, url), Client(url, "wrong") as client:
        with pytest.raises(ServerError):
            await Watcher(client).look()
