"""``tugline cancel`` of tasks and sessions."""

from __future__ import annotations

import json

from cli.conftest import Shell
from support.tasks import make_task


async def test_tasks_and_sessions_are_cancelled(shell: Shell) -> None:
    """The sessions that ended are printed; with an unknown name nothing is cancelled."""
    await shell.live.control.submit([make_task("a", samples=3), make_task("b")])
    done = await shell.run("cancel", "a-1", "b", "--json")
    ended = {name: report["ended"] for name, report in json.loads(done.stdout).items()}
    assert ended == {"a-1": ["a-1"], "b": ["b-0"]}
    assert (await shell.run("cancel", "a")).stdout == "a: 2 ended, 1 final before\n"
    await shell.live.control.submit([make_task("d")])
    unknown = await shell.run("cancel", "d", "c")
    assert unknown.returncode == 2
    assert "'c' is neither a task nor a session" in unknown.stderr
    assert (await shell.run("cancel", "d")).stdout == "d: 1 ended\n", "nothing was cancelled before"
