"""``tugline submit``: all or nothing, and the same again changes nothing."""

from __future__ import annotations

import asyncio
import json
import signal

from cli.conftest import Shell, end
from leased import result
from tugline.server.store import stats, tasks
from tugline.types import Cause

TASK = "id: {id}\ninstruction: do\nharness: {{name: pi}}\nevaluator: {{name: tests}}\nsamples: 2\n"


async def list_tasks(shell: Shell) -> list[str]:
    """Ids of the tasks that the server has."""
    return [task.id for task in (await shell.house.control.database.read(tasks.page)).tasks]


async def test_tasks_are_submitted_and_waited_for(shell: Shell) -> None:
    """The table in the end says how they went; submitted again, they are over at once."""
    for name in ("a", "b"):
        (shell.folder / f"{name}.yaml").write_text(TASK.format(id=name))
    submitting = await shell.start("submit", ".", "--wait")
    played: list[str] = []
    while len(played) < 4:
        played += await shell.house.finish(wait_s=0.5)
    done = await end(submitting)
    assert done.code == 0, done.err
    assert "accepted tasks: 2, sessions: 4\n" in done.err
    assert [line.split()[:3] for line in done.out.splitlines()[1:3]] == [
        ["a", "released", "2/2"],
        ["b", "released", "2/2"],
    ]
    assert done.out.splitlines()[-1].endswith("are usable, mean reward 1, 4 of 4 passed")
    again = await shell.run("submit", "a.yaml", "--wait", "--json")
    report = json.loads(again.out)
    assert "accepted tasks: 1 (known already: 1), sessions: 2" in again.err
    assert [one["new"] for one in report["accepted"]] == [False]
    assert report["released"][0]["usable"] == 2


async def test_nothing_is_sent_if_something_is_wrong(shell: Shell) -> None:
    """One bad task of many, or an id that cannot be: exit code 2 and an empty server."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a"))
    (shell.folder / "b.yaml").write_text(TASK.format(id="b") + "priority: 11\n")
    done = await shell.run("submit", "a.yaml", "b.yaml")
    assert done.code == 2
    assert "b.yaml: priority is 11, must be an integer <= 10" in done.err
    done = await shell.run("submit", "a.yaml", "--run", "a/b")
    assert (done.code, "'a/b-a'" in done.err) == (2, True)
    assert await list_tasks(shell) == []


async def test_a_run_has_ids_of_its_own(shell: Shell) -> None:
    """The same file twice are two tasks; another task of the same name is refused."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a"))
    for arguments in ((), ("--run", "second"), ("--run", "second")):
        assert (await shell.run("submit", "a.yaml", *arguments)).code == 0
    assert sorted(await list_tasks(shell)) == ["a", "second-a"]
    (shell.folder / "a.yaml").write_text(TASK.format(id="a") + "priority: 1\n")
    done = await shell.run("submit", "a.yaml")
    assert (done.code, "another id" in done.err) == (2, True)


async def test_an_interrupt_leaves_the_tasks_running(shell: Shell) -> None:
    """And says so."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a"))
    submitting = await shell.start("submit", "a.yaml", "--wait")
    while not await list_tasks(shell):  # noqa: ASYNC110 - the command does it
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    submitting.send_signal(signal.SIGINT)
    done = await end(submitting)
    assert done.code == 130
    assert "accepted tasks continue" in done.err
    assert (await shell.house.control.database.read(stats.counts)).sessions == {"queued": 2}


async def test_the_first_failure_is_named_while_waiting(shell: Shell) -> None:
    """A reader sees why, without looking for the session; a sample that misses is exit code 1."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a").replace("samples: 2", "samples: 1"))
    submitting = await shell.start("submit", "a.yaml", "--wait")
    async with shell.lease() as (node, [work]):
        of = work.session
        await node.commit(of.id, of.epoch, result(of, failure=Cause.TASK))
    done = await end(submitting)
    assert done.code == 1
    assert "first failure: a-0: failed runtime: it broke" in done.err, done.err
