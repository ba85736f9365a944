"""``tugline status`` of a server, of a task and of a session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.conftest import TUGLINE, Shell
from support.deployment import CALL, Deployment, deploy, script_task
from support.polling import until
from support.server import TOKENS
from support.tasks import make_task
from tugline.cli.tables import make_overview
from tugline.client.api import Client
from tugline.client.overview import Monitor
from tugline.errors import ServerError
from tugline.protocol import NodeRegistration, NodeState
from tugline.server.http.app import Api, serve_api
from tugline.types import Status

SLOW = f"{CALL}\nimport time; time.sleep(30)"
STRAGGLER = f"{CALL}\nimport os, time\nwhile 'g-2.' in os.getcwd():\n    time.sleep(0.1)\n"
"""An agent that never ends for the third sample of the group."""


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Deployment, str]]:
    """Serve the API of a server with one node; yield its URL."""
    async with deploy(folder) as deployment:
        app = Api(deployment.control, TOKENS, deployment.pages)
        async with serve_api(app) as url:
            yield deployment, url


async def test_a_server_a_task_and_a_session(shell: Shell) -> None:
    """Server, task and session are printed as tables and JSON; a pipe gets --watch once."""
    await shell.live.control.submit([make_task("a", samples=2), make_task("b")])
    await shell.live.finish(limit=2)
    whole = await shell.run("status", "--watch")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "\x1b" not in whole.stdout
    for line in ("finished  2 completed", "tasks     1 open", "weights 0", "b     open"):
        assert line in whole.stdout, whole.stdout
    output: dict[str, Any] = json.loads((await shell.run("status", "--json")).stdout)
    assert output["counts"]["sessions"] == {"queued": 1, "completed": 2}
    output = json.loads((await shell.run("status", "a", "--json")).stdout)
    assert output["task"]["state"] == "released"
    assert [session["id"] for session in output["sessions"]] == ["a-0", "a-1"]
    session = (await shell.run("status", "a-0")).stdout
    assert ("completed" in session, "reward: 1; " in session) == (True, True)
    done = await shell.run("status", "x")
    assert done.returncode == 2
    error = f"tugline: 'x' is neither a task nor a session of {shell.live.url}\n"
    assert done.stderr == error


async def test_an_overview_has_queue_stages_tasks_and_failures(tmp_path: Path) -> None:
    """A read token of a real server with a real node suffices; a wrong one is an error."""
    async with served(tmp_path) as (deployment, url), Client(url, TOKENS.read) as client:
        async with Client(url, "wrong") as stranger:
            with pytest.raises(ServerError):
                await Monitor(stranger).read()
        await deployment.run(script_task("bad", "exit(3)"))
        await deployment.control.submit([script_task("g", STRAGGLER, samples=3)])
        await until(lambda: deployment.node.stats.committed == 3)
        await deployment.control.submit([script_task("long", SLOW, samples=9, tenant="other")])
        await until(lambda: deployment.node.pools.by_stage[Status.RUN].busy == 2)
        monitor = Monitor(client)
        first = overview = await monitor.read()
        async with asyncio.timeout(20):  # the node reports with its next lease, after its sessions
            while not 0 < overview.nodes[0].node.running == sum(overview.nodes[0].stages.values()):
                overview = await monitor.read()
        console = Console(width=140, color_system=None)
        with console.capture() as screen:
            console.print(make_overview(overview))
    assert first.sessions_per_minute == overview.sessions_per_minute == 3, (
        "nothing is counted twice"
    )
    assert overview.queue["other"] > 0
    assert [view.id for view in overview.open] == ["g", "long"]
    assert overview.open[0].counts["completed"] == 2
    assert [failure.session for failure in overview.failures] == ["bad-0", "bad-0"]
    assert overview.failures[0].reason.startswith("failed harness: ")
    assert overview.failures[1].reason.startswith("requeued: harness: ")
    assert overview.tokens_per_second > 0
    (load,) = overview.nodes
    assert 0 < load.lease_s <= 30
    for cell in (url, "here", "other", "bad-0", "2/3", "sessions/min"):
        assert cell in screen.get()


async def test_a_lost_node_is_listed_for_ten_minutes(shell: Shell) -> None:
    """A lost node is marked as gone; one that was lost earlier is left out."""
    for _ in range(2):
        registration = NodeRegistration(name="old", slots=1, capacity=1)
        await shell.live.control.dispatcher.register(registration)
    async with shell.live.client() as client:
        nodes = [load.node for load in (await Monitor(client).read()).nodes]
        lost, live = sorted(nodes, key=lambda node: node.state)
        assert (lost.state, live.state) == (NodeState.GONE, NodeState.LIVE)
        later = await Monitor(client, clock=lambda: lost.deadline + 601).read()
        assert NodeState.GONE not in {load.node.state for load in later.nodes}


async def test_watch_refreshes_a_terminal_until_interrupted(tmp_path: Path) -> None:
    """Changes are drawn; Ctrl-C ends the command with exit code 0."""
    async with served(tmp_path) as (deployment, url):
        terminal, terminal_side = pty.openpty()
        program = await asyncio.create_subprocess_exec(
            TUGLINE,
            *("status", "--watch", "--every", "0.2", "--server", url, "--token", TOKENS.read),
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
            stdin=terminal_side,
            stdout=terminal_side,
            stderr=terminal_side,
        )
        os.close(terminal_side)
        os.set_blocking(terminal, False)
        output = b""

        def has(text: bytes) -> bool:
            nonlocal output
            with contextlib.suppress(BlockingIOError):
                output += os.read(terminal, 1 << 16)
            return text in output

        try:
            await until(lambda: has(b"none"))
            await deployment.run(script_task("a"))
            await until(lambda: has(b"1 completed"))
            program.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(program.wait(), 10) == 0
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
            os.close(terminal)
