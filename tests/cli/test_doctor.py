"""``tugline doctor`` without an engine: problems of the server and of this machine."""

from __future__ import annotations

import json

from cli.conftest import Shell
from support.commands import TUGLINE, run_program
from support.server import TOKENS
from support.tasks import make_task
from tugline.client.nodes import NodeClient
from tugline.protocol import NodeRegistration


async def test_reasons_why_no_session_runs(shell: Shell) -> None:
    """No node, paused weights and no server are reported, with exit code 1."""
    await shell.live.control.submit([make_task("a", samples=3)])
    alone = await shell.run("doctor", "--json")
    reports = {report["component"]: report for report in json.loads(alone.stdout)}
    assert alone.returncode == 1
    assert reports["server"]["healthy"]
    assert reports["nodes"]["detail"].startswith("3 sessions are queued and no node is live")
    async with NodeClient(shell.live.url, TOKENS.join) as node:
        await node.register(NodeRegistration(name="n", slots=2, capacity=2))
    sound = await shell.run("doctor")
    assert sound.returncode == 0, sound.stdout
    assert "n is live, 0 sessions, 2 slots" in sound.stdout
    await shell.live.control.pause(within_s=0.1)
    paused = await shell.run("doctor")
    assert (paused.returncode, "model calls are paused" in paused.stdout) == (1, True)
    await shell.live.stop()
    gone = await shell.run("doctor", "--json")
    (report,) = json.loads(gone.stdout)
    assert (gone.returncode, report["component"]) == (1, "server")
    assert shell.live.url in report["detail"]


def test_a_low_limit_of_open_files_is_reported() -> None:
    """The advice has the number of agents for which a limit of open files is enough."""
    limited = f"ulimit -n 999; exec {TUGLINE} doctor --runtimes --json"
    done = run_program("sh", "-c", limited, check=True)
    (advice,) = json.loads(done.stdout)["open files"]["weaknesses"]
    assert advice.startswith("999 are enough for about 62 agents")
