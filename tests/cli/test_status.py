"""``tugline status``: a server, a task, a session; once or until interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import io
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
from house import task as a_task
from observed import CALL, Observed, observed, task, until
from served import TOKENS
from tugline.cli.status import render
from tugline.client.api import Client
from tugline.client.overview import Monitor, Overview
from tugline.errors import ServerError
from tugline.protocol import NodeRegistration, NodeState
from tugline.server.http.app import Api, serve_api
from tugline.types import Status

SLOW = f"{CALL}\nimport time; time.sleep(30)"
STRAGGLER = f"{CALL}\nimport os, time\nwhile 'g-2.' in os.getcwd():\n    time.sleep(0.1)\n"
"""The third sample of the group never ends."""


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Observed, str]]:
    """Server and node, with the API at an address."""
    async with observed(folder) as rig:
        app = Api(rig.control, TOKENS, rig.pages)
        async with serve_api(app) as url:
            yield rig, url


def to_text(seen: Overview) -> str:
    """The screen as plain text."""
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(render(seen))
    return console.file.getvalue()  # type: ignore[attr-defined]


async def test_a_server_a_task_and_a_session(shell: Shell) -> None:
    """As tables for people, and as JSON; with --watch, but no terminal, it ends as well."""
    await shell.house.control.submit([a_task("a", samples=2), a_task("b")])
    await shell.house.finish(limit=2)
    whole = await shell.run("status", "--watch")
    assert (whole.code, whole.err) == (0, "")
    assert "\x1b" not in whole.out
    for line in ("finished  2 completed", "tasks     1 open", "weights 0", "b     open"):
        assert line in whole.out, whole.out
    seen: dict[str, Any] = json.loads((await shell.run("status", "--json")).out)
    assert seen["counts"]["sessions"] == {"queued": 1, "completed": 2}
    assert [node["node"]["slots"] for node in seen["nodes"]] == [2]
    seen = json.loads((await shell.run("status", "a", "--json")).out)
    assert seen["task"]["state"] == "released"
    assert [session["id"] for session in seen["sessions"]] == ["a-0", "a-1"]
    session = (await shell.run("status", "a-0")).out
    assert "completed" in session
    assert "reward: 1; " in session


async def test_what_is_not_there_is_one_line(shell: Shell) -> None:
    """An unknown name, no server known, a server that does not answer."""
    done = await shell.run("status", "x")
    assert done.code == 2
    assert done.err == f"tugline: there is neither a task nor a session 'x' at {shell.house.url}\n"
    done = await shell.run("status", "--dir", "elsewhere")
    assert done.code == 2
    assert "start one with `tugline up`" in done.err


async def test_an_overview_has_queue_stages_tasks_and_failures(tmp_path: Path) -> None:
    """Of a real server with a real node; a read token is enough, and a wrong one an error."""
    async with served(tmp_path) as (rig, url), Client(url, TOKENS.read) as client:
        async with Client(url, "wrong") as stranger:
            with pytest.raises(ServerError):
                await Monitor(stranger).read()
        await rig.run(task("bad", "exit(3)"))
        await rig.control.submit([task("g", STRAGGLER, samples=3)])
        await until(lambda: rig.node.stats.committed == 3)
        await rig.control.submit([task("long", SLOW, samples=9, tenant="other")])
        await until(lambda: rig.node.pools.by_stage[Status.RUN].busy == 2)
        monitor = Monitor(client)
        first = seen = await monitor.read()
        async with asyncio.timeout(20):  # the node reports with its next lease, after its sessions
            while not 0 < seen.nodes[0].node.running == sum(seen.nodes[0].stages.values()):
                seen = await monitor.read()
        text = to_text(seen)
    assert first.sessions_per_minute == seen.sessions_per_minute == 3, "nothing is counted twice"
    assert seen.queue["other"] > 0
    assert [view.id for view in seen.open] == ["g", "long"]
    assert seen.open[0].counts["completed"] == 2
    assert [failure.session for failure in seen.failures] == ["bad-0", "bad-0"]
    assert seen.failures[0].reason.startswith("failed harness: ")
    assert seen.failures[1].reason.startswith("requeued: harness: ")
    assert seen.tokens_per_second > 0
    (load,) = seen.nodes
    assert load.node.name == "here"
    assert 0 < load.lease_s <= 30
    for cell in (url, "here", "other", "bad-0", "2/3", "sessions/min"):
        assert cell in text, text


async def test_a_lost_node_is_listed_for_ten_minutes(tmp_path: Path) -> None:
    """It is marked; those that were lost longer ago are left out."""
    async with served(tmp_path) as (rig, url), Client(url, TOKENS.read) as client:
        await rig.control.dispatcher.register(NodeRegistration(name="old", slots=1, capacity=1))
        await rig.control.dispatcher.register(NodeRegistration(name="old", slots=1, capacity=1))
        seen = await Monitor(client).read()
        states = sorted((load.node.name, load.node.state.value) for load in seen.nodes)
        assert states == [("here", "live"), ("old", "gone"), ("old", "live")]
        lost = next(load.node for load in seen.nodes if load.node.state is NodeState.GONE)
        later = await Monitor(client, clock=lambda: lost.deadline + 601).read()
        assert NodeState.GONE not in {load.node.state for load in later.nodes}


async def test_on_a_terminal_it_refreshes_until_interrupted(tmp_path: Path) -> None:
    """It shows what changes, and Ctrl-C is how it is left."""
    async with served(tmp_path) as (rig, url):
        ours, theirs = pty.openpty()
        program = await asyncio.create_subprocess_exec(
            TUGLINE,
            *("status", "--watch", "--every", "0.2", "--server", url, "--token", TOKENS.read),
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        output = b""

        def has(text: bytes) -> bool:
            nonlocal output
            with contextlib.suppress(BlockingIOError):
                output += os.read(ours, 1 << 16)
            return text in output

        try:
            await until(lambda: has(b"none"))
            await rig.run(task("a"))
            await until(lambda: has(b"1 completed"))
            program.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(program.wait(), 10) == 0
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
            os.close(ours)
