"""``tugline doctor`` without an engine: what is wrong with the server that runs here."""

from __future__ import annotations

import json

from cli.conftest import Shell
from commands import TUGLINE, run_program
from house import task
from served import TOKENS
from tugline.client.nodes import NodeClient
from tugline.protocol import NodeRegistration


async def test_it_says_what_keeps_sessions_from_running(shell: Shell) -> None:
    """No node, paused weights, no server: what is wrong has exit code 1; a node is well."""
    await shell.house.control.submit([task("a", samples=3)])
    alone = await shell.run("doctor", "--json")
    found = {one["component"]: one for one in json.loads(alone.out)}
    assert alone.code == 1
    assert found["server"]["healthy"]
    assert found["nodes"]["detail"].startswith("3 sessions are queued and no node is live")
    async with NodeClient(shell.house.url, TOKENS.join) as node:
        await node.register(NodeRegistration(name="n", slots=2, capacity=2))
    sound = await shell.run("doctor")
    assert sound.code == 0, sound.out
    assert "n is live, 0 sessions, 2 slots" in sound.out
    await shell.house.control.pause(within_s=0.1)
    paused = await shell.run("doctor")
    assert (paused.code, "model calls are paused" in paused.out) == (1, True)
    await shell.house.stop()
    gone = await shell.run("doctor", "--json")
    (found,) = json.loads(gone.out)
    assert (gone.code, found["component"]) == (1, "server")
    assert shell.house.url in found["detail"]


def test_a_limit_of_open_files_that_is_too_low_for_a_node_is_told() -> None:
    """Hundreds of agents need thousands of files; what the system forbids, it must be told."""
    limited = f"ulimit -n 999; exec {TUGLINE} doctor --runtimes --json"
    done = run_program("sh", "-c", limited, check=True)
    (advice,) = json.loads(done.stdout)["open files"]["weaknesses"]
    assert advice.startswith("999 suffice for about 62 agents")
