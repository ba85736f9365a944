"""``tugline status``, ``results``, ``logs`` and ``cancel``."""

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

from cli.conftest import TUGLINE, Shell, end
from live_server import commit
from live_server import task as a_task
from observed import CALL, Observed, observed, task
from rig import until
from served import TOKENS
from tugline.cli.status import render
from tugline.client.api import Client
from tugline.client.overview import Monitor
from tugline.errors import ServerError
from tugline.protocol import NodeRegistration, NodeState
from tugline.recording.trajectories import read_folder
from tugline.server.http.app import Api, serve_api
from tugline.types import Status

SLOW = f"{CALL}\nimport time; time.sleep(30)"
STRAGGLER = f"{CALL}\nimport os, time\nwhile 'g-2.' in os.getcwd():\n    time.sleep(0.1)\n"
"""An agent that never ends for the third sample of the group."""


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Observed, str]]:
    """Serve the API of a server with one node; yield its URL."""
    async with observed(folder) as rig:
        app = Api(rig.control, TOKENS, rig.pages)
        async with serve_api(app) as url:
            yield rig, url


async def test_a_server_a_task_and_a_session(shell: Shell) -> None:
    """Printed as tables and as JSON; without a terminal --watch prints once."""
    await shell.live.control.submit([a_task("a", samples=2), a_task("b")])
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
    """Read from a real server with a real node; a read token suffices, a wrong one is an error."""
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
        first = overview = await monitor.read()
        async with asyncio.timeout(20):  # the node reports with its next lease, after its sessions
            while not 0 < overview.nodes[0].node.running == sum(overview.nodes[0].stages.values()):
                overview = await monitor.read()
        console = Console(width=140, color_system=None)
        with console.capture() as screen:
            console.print(render(overview))
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
    """It is marked as gone; nodes that were lost earlier are left out."""
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
    """Changes are drawn; Ctrl-C ends it with exit code 0."""
    async with served(tmp_path) as (rig, url):
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
            await rig.run(task("a"))
            await until(lambda: has(b"1 completed"))
            program.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(program.wait(), 10) == 0
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
            os.close(terminal)


async def test_a_consumer_continues_where_it_stopped(shell: Shell) -> None:
    """Each result is printed once."""
    await shell.live.control.submit([a_task("a", samples=2)])
    await shell.live.finish()
    first = await shell.run("results", "--consumer", "me", "--json")
    assert [json.loads(line)["session"] for line in first.stdout.splitlines()] == ["a-0", "a-1"]
    again = await shell.run("results", "--consumer", "me")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "no new results\n")


async def test_results_are_saved_as_a_folder_that_trainers_read(shell: Shell) -> None:
    """A second call adds new results."""
    for name in ("a", "b"):
        await shell.live.control.submit([a_task(name)])
        await shell.live.finish()
        done = await shell.run("results", "--out", "kept")
        assert [line.split()[1] for line in done.stdout.splitlines()] == [f"{name}-0"]
    assert "saved in kept: 1 new, 2 in total" in done.stderr
    kept = shell.folder / "kept"
    lines = (kept / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines] == ["a-0", "b-0"]
    assert [each.session for each in read_folder(kept / "trajectories")] == ["a-0", "b-0"]


async def test_a_log_is_printed_and_followed(shell: Shell) -> None:
    """Printed unchanged; ``-f`` ends with the session."""
    async with shell.lease(a_task("a")) as (node, [work]):
        epoch = work.session.epoch
        await node.log("a-0", epoch, 0, b"one\n")
        following = await shell.start("logs", "-f", "a-0")
        assert await following.stdout.readline() == b"one\n"
        await node.log("a-0", epoch, 4, b"two\n")
        assert await following.stdout.readline() == b"two\n"
        await commit(node, work)
        await end(following)


async def test_a_terminal_gets_no_escape_sequences(shell: Shell) -> None:
    """An agent cannot set the title, move the cursor or hide text; a pipe gets the raw bytes."""
    logged = b"a\x1b]0;owned\x07b\xc2\x9b2Jc\xe2\x80\xaed\te \xff\n"
    async with shell.lease(a_task("a")) as (node, [work]):
        await node.log("a-0", work.session.epoch, 0, logged)
    terminal, side = os.openpty()
    try:
        command = (TUGLINE, "logs", "a-0")
        output = await asyncio.create_subprocess_exec(*command, cwd=shell.folder, stdout=side)
        assert await asyncio.wait_for(output.wait(), 40) == 0
        text = os.read(terminal, 4096).decode()
    finally:
        os.close(side)
        os.close(terminal)
    assert text == "a\\x1b]0;owned\\x07b\\x9b2Jc\\u202ed\te \ufffd\r\n"
    piped = await shell.start("logs", "a-0")
    assert await piped.stdout.read() == logged
    assert (await shell.run("logs", "a-0", "--tail", "1")).stdout == "\n"


async def test_tasks_and_sessions_are_cancelled(shell: Shell) -> None:
    """The sessions that ended are printed; with an unknown name nothing is cancelled."""
    await shell.live.control.submit([a_task("a", samples=3), a_task("b")])
    done = await shell.run("cancel", "a-1", "b", "--json")
    ended = {name: report["ended"] for name, report in json.loads(done.stdout).items()}
    assert ended == {"a-1": ["a-1"], "b": ["b-0"]}
    assert (await shell.run("cancel", "a")).stdout == "a: 2 ended, 1 final before\n"
    await shell.live.control.submit([a_task("d")])
    unknown = await shell.run("cancel", "d", "c")
    assert (unknown.returncode, "'c' is neither a task nor a session" in unknown.stderr) == (
        2,
        True,
    )
    assert (await shell.run("cancel", "d")).stdout == "d: 1 ended\n", "nothing was cancelled before"
