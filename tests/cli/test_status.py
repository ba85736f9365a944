"""``tugline status``: the whole, a task, a session."""

from __future__ import annotations

import json

from cli.conftest import Shell
from house import task


async def test_the_whole_a_task_and_a_session(shell: Shell) -> None:
    """As tables for people, and as JSON."""
    await shell.house.control.submit([task("a", samples=2), task("b")])
    await shell.house.finish(limit=2)
    told = await shell.run("status")
    assert told.code == 0, told.err
    assert "2 completed" in told.out.splitlines()[0]
    assert "tasks open: 1; nodes: 1 with 2 slots; weights: version 0" in told.out
    seen = json.loads((await shell.run("status", "a", "--json")).out)
    assert seen["task"]["state"] == "released"
    assert [one["id"] for one in seen["sessions"]] == ["a-0", "a-1"]
    one = (await shell.run("status", "a-0")).out
    assert "completed" in one
    assert "reward: 1; " in one


async def test_an_unknown_name_is_exit_code_2(shell: Shell) -> None:
    """One line that says where it was looked for."""
    done = await shell.run("status", "x")
    assert done.code == 2
    assert done.err == f"tugline: there is neither a task nor a session 'x' at {shell.house.url}\n"


async def test_without_a_server_it_says_what_to_do(shell: Shell) -> None:
    """No files and no flags."""
    done = await shell.run("status", "--dir", "elsewhere")
    assert done.code == 2
    assert "start one with `tugline up`" in done.err
