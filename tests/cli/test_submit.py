"""``tugline submit``: all or nothing, and the same again changes nothing."""

from __future__ import annotations

import asyncio
import json
import signal

from cli.conftest import Shell, end
from leased import result
from served import TOKENS
from tugline.client.nodes import NodeClient
from tugline.protocol import LeaseRequest, NodeRegistration
from tugline.server.store import results, stats, tasks
from tugline.types import Cause

TASK = "id: {id}\ninstruction: do\nharness: {{name: pi}}\nevaluator: {{name: tests}}\nsamples: 2\n"


async def test_tasks_are_submitted_and_waited_for(shell: Shell) -> None:
    """The table in the end says how they went; submitted again, they are over at once."""
    for name in ("a", "b"):
        shell.file(f"{name}.yaml", TASK.format(id=name))
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


async def test_samples_that_miss_are_exit_code_1(shell: Shell) -> None:
    """A script that waits need not read the table."""
    shell.file("a.yaml", TASK.format(id="a"))
    submitting = await shell.start("submit", "a.yaml", "--wait", "--json")
    while not (await shell.house.control.database.read(tasks.page)).tasks:  # noqa: ASYNC110 - the command does it
        await asyncio.sleep(0.05)
    await shell.house.control.database.write(results.cancel_task, "a", by="somebody")
    done = await end(submitting)
    assert done.code == 1
    [task] = json.loads(done.out)["released"]
    assert (task["missing"], task["reason"]) == ([0, 1], "cancelled by somebody")


async def test_nothing_is_sent_if_something_is_wrong(shell: Shell) -> None:
    """One bad task of many: exit code 2 and an empty server."""
    shell.file("a.yaml", TASK.format(id="a"))
    shell.file("b.yaml", TASK.format(id="b") + "priority: 11\n")
    done = await shell.run("submit", "a.yaml", "b.yaml")
    assert done.code == 2
    assert "b.yaml: priority is 11, must be an integer <= 10" in done.err
    assert (await shell.house.control.database.read(tasks.page)).tasks == ()


async def test_what_the_server_refuses_is_exit_code_2(shell: Shell) -> None:
    """Another task of the same name."""
    shell.file("a.yaml", TASK.format(id="a"))
    assert (await shell.run("submit", "a.yaml")).code == 0
    shell.file("a.yaml", TASK.format(id="a") + "priority: 1\n")
    done = await shell.run("submit", "a.yaml")
    assert done.code == 2
    assert "another id" in done.err


async def test_a_run_has_ids_of_its_own(shell: Shell) -> None:
    """The same file twice are two tasks; a name that no id may have is refused."""
    shell.file("a.yaml", TASK.format(id="a"))
    for arguments in ((), ("--run", "second"), ("--run", "second")):
        assert (await shell.run("submit", "a.yaml", *arguments)).code == 0
    page = await shell.house.control.database.read(tasks.page)
    assert sorted(task.id for task in page.tasks) == ["a", "second-a"]
    refused = await shell.run("submit", "a.yaml", "--run", "a/b")
    assert (refused.code, "'a/b-a'" in refused.err) == (2, True)


async def test_an_interrupt_leaves_the_tasks_running(shell: Shell) -> None:
    """And says so."""
    shell.file("a.yaml", TASK.format(id="a"))
    submitting = await shell.start("submit", "a.yaml", "--wait")
    while not (await shell.house.control.database.read(tasks.page)).tasks:  # noqa: ASYNC110 - the command does it
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    submitting.send_signal(signal.SIGINT)
    done = await end(submitting)
    assert done.code == 130
    assert "accepted tasks continue" in done.err
    assert (await shell.house.control.database.read(stats.counts)).sessions == {"queued": 2}


async def test_the_first_failure_is_named_while_waiting(shell: Shell) -> None:
    """A reader sees why, without looking for the session."""
    shell.file("a.yaml", TASK.format(id="a").replace("samples: 2", "samples: 1"))
    submitting = await shell.start("submit", "a.yaml", "--wait")
    async with NodeClient(shell.house.url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="played", slots=1, capacity=1))
        ask = LeaseRequest(capacity=1, applied=welcome.control.generation, wait_s=20)
        [work] = (await node.lease(welcome.node, ask)).work
        of = work.session
        await node.commit(of.id, of.epoch, result(of, failure=Cause.TASK))
    done = await end(submitting)
    assert "first failure: a-0: failed runtime: it broke" in done.err, done.err
