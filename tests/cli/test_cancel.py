"""``tugline cancel``: tasks and sessions by their names."""

from __future__ import annotations

import json

from cli.conftest import Shell
from house import task


async def test_tasks_and_sessions_are_ended(shell: Shell) -> None:
    """It says what it met; an unknown name is exit code 2."""
    await shell.house.control.submit([task("a", samples=3), task("b")])
    done = await shell.run("cancel", "a-1", "b", "--json")
    assert {name: one["ended"] for name, one in json.loads(done.out).items()} == {
        "a-1": ["a-1"],
        "b": ["b-0"],
    }
    assert (await shell.run("cancel", "a")).out == "a: 2 ended, 1 final before\n"
    unknown = await shell.run("cancel", "c")
    assert unknown.code == 2
    assert "neither a task nor a session 'c'" in unknown.err
