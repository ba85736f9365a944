"""``tugline results``: consumers, and results that are saved."""

from __future__ import annotations

import json

from cli.conftest import Shell
from support.tasks import make_task
from tugline.recording.trajectories import read_folder


async def test_a_consumer_continues_where_it_stopped(shell: Shell) -> None:
    """Each result is printed once."""
    await shell.live.control.submit([make_task("a", samples=2)])
    await shell.live.finish()
    first = await shell.run("results", "--consumer", "me", "--json")
    assert [json.loads(line)["session"] for line in first.stdout.splitlines()] == ["a-0", "a-1"]
    again = await shell.run("results", "--consumer", "me")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "no new results\n")


async def test_results_are_saved_as_a_folder_that_trainers_read(shell: Shell) -> None:
    """A second call adds new results."""
    for name in ("a", "b"):
        await shell.live.control.submit([make_task(name)])
        await shell.live.finish()
        done = await shell.run("results", "--out", "kept")
        assert [line.split()[1] for line in done.stdout.splitlines()] == [f"{name}-0"]
    assert "saved in kept: 1 new, 2 in total" in done.stderr
    kept = shell.folder / "kept"
    lines = (kept / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines] == ["a-0", "b-0"]
    assert [each.session for each in read_folder(kept / "trajectories")] == ["a-0", "b-0"]
