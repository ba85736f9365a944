"""``tugline submit``: atomic and idempotent."""

from __future__ import annotations

import asyncio
import json
import signal

from cli.conftest import Shell, end
from support.control_plane import make_result
from support.polling import until
from tugline.server.store import stats, tasks
from tugline.types import Cause

TASK = "id: {id}\ninstruction: do\nharness: {{name: pi}}\nevaluator: {{name: tests}}\nsamples: 2\n"


async def list_tasks(shell: Shell) -> list[str]:
    """Ids of the server's tasks."""
    return [task.id for task in (await shell.live.control.database.read(tasks.page)).tasks]


async def test_tasks_are_submitted_and_waited_for(shell: Shell) -> None:
    """The final table has the tasks' outcomes; submitted again, the command ends at once."""
    for name in ("a", "b"):
        (shell.folder / f"{name}.yaml").write_text(TASK.format(id=name))
    submitting = await shell.start("submit", ".", "--wait")
    finished: list[str] = []
    while len(finished) < 4:
        finished += await shell.live.finish(wait_s=0.5)
    out, err = await end(submitting)
    assert "accepted tasks: 2, sessions: 4\n" in err
    assert [line.split()[:3] for line in out.splitlines()[1:3]] == [
        ["a", "released", "2/2"],
        ["b", "released", "2/2"],
    ]
    assert out.splitlines()[-1].endswith("are usable; mean reward 1, 4 of 4 passed")
    again = await shell.run("submit", "a.yaml", "--wait", "--json")
    report = json.loads(again.stdout)
    assert "accepted tasks: 1 (1 already submitted), sessions: 2" in again.stderr
    assert [task["new"] for task in report["accepted"]] == [False]
    assert report["released"][0]["usable"] == 2


async def test_one_bad_task_prevents_the_submission(shell: Shell) -> None:
    """A bad field or an invalid id of one task is exit code 2, and the server has no task."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a"))
    (shell.folder / "b.yaml").write_text(TASK.format(id="b") + "priority: 11\n")
    done = await shell.run("submit", "a.yaml", "b.yaml")
    assert done.returncode == 2
    assert "b.yaml: priority is 11, must be an integer <= 10" in done.stderr
    done = await shell.run("submit", "a.yaml", "--run", "a/b")
    assert (done.returncode, "'a/b-a'" in done.stderr) == (2, True)
    assert await list_tasks(shell) == []


async def test_a_run_name_prefixes_the_ids(shell: Shell) -> None:
    """The same file in two runs makes two tasks; another task of the same id is refused."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a"))
    for arguments in ((), ("--run", "second"), ("--run", "second")):
        assert (await shell.run("submit", "a.yaml", *arguments)).returncode == 0
    assert sorted(await list_tasks(shell)) == ["a", "second-a"]
    (shell.folder / "a.yaml").write_text(TASK.format(id="a") + "priority: 1\n")
    done = await shell.run("submit", "a.yaml")
    assert (done.returncode, "another id" in done.stderr) == (2, True)


async def test_an_interrupt_leaves_the_tasks_running(shell: Shell) -> None:
    """The interrupted command states that its tasks run on, and exits with 130."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a"))
    submitting = await shell.start("submit", "a.yaml", "--wait")
    await until(lambda: list_tasks(shell))
    await asyncio.sleep(0.3)
    submitting.send_signal(signal.SIGINT)
    _, err = await end(submitting, 130)
    assert "accepted tasks continue" in err
    assert (await shell.live.control.database.read(stats.counts)).sessions == {"queued": 2}


async def test_the_first_failure_is_named_while_waiting(shell: Shell) -> None:
    """The user need not look for the session; a missing sample is exit code 1."""
    (shell.folder / "a.yaml").write_text(TASK.format(id="a").replace("samples: 2", "samples: 1"))
    submitting = await shell.start("submit", "a.yaml", "--wait")
    async with shell.lease() as (node, [work]):
        of = work.session
        await node.commit(of.id, of.epoch, make_result(of, failure=Cause.TASK))
    _, err = await end(submitting, 1)
    assert "first failure: a-0: failed runtime: it broke" in err
