"""``tugline results``: told once to a consumer, saved before they are acknowledged."""

from __future__ import annotations

import json

from cli.conftest import Shell
from house import task
from tugline.recording.trajectories import read_folder


async def test_a_consumer_goes_on_where_it_left_off(shell: Shell) -> None:
    """What was told is not told again."""
    await shell.house.control.submit([task("a", samples=2)])
    await shell.house.finish()
    first = await shell.run("results", "--consumer", "me", "--json")
    assert [json.loads(line)["session"] for line in first.out.splitlines()] == ["a-0", "a-1"]
    again = await shell.run("results", "--consumer", "me")
    assert (again.code, again.out, again.err) == (0, "", "nothing new\n")


async def test_results_are_saved_as_a_folder_that_trainers_read(shell: Shell) -> None:
    """A second call adds what is new."""
    await shell.house.control.submit([task("a")])
    await shell.house.finish()
    assert (await shell.run("results", "--out", "kept")).code == 0
    await shell.house.control.submit([task("b")])
    await shell.house.finish()
    done = await shell.run("results", "--out", "kept")
    assert "saved in kept: 1 new, 2 in all" in done.err
    assert [line.split()[1] for line in done.out.splitlines()] == ["b-0"]
    kept = shell.folder / "kept"
    lines = (kept / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines] == ["a-0", "b-0"]
    assert [one.session for one in read_folder(kept / "trajectories")] == ["a-0", "b-0"]
