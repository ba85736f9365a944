"""``tugline logs``: what an agent printed, to the end if followed."""

from __future__ import annotations

from cli.conftest import Shell, end
from house import commit, task
from served import TOKENS
from tugline.client.nodes import NodeClient
from tugline.protocol import LeaseRequest, NodeRegistration


async def test_a_log_is_printed_and_followed(shell: Shell) -> None:
    """Bytes as they are; ``-f`` ends with the session."""
    await shell.house.control.submit([task("a")])
    async with NodeClient(shell.house.url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="n", slots=1, capacity=1))
        (work,) = (await node.lease(welcome.node, LeaseRequest(capacity=1, wait_s=5.0))).work
        epoch = work.session.epoch
        await node.log("a-0", epoch, 0, b"one\n")
        following = await shell.start("logs", "-f", "a-0")
        assert following.stdout is not None
        assert await following.stdout.readline() == b"one\n"
        await node.log("a-0", epoch, 4, b"two\n")
        assert await following.stdout.readline() == b"two\n"
        await commit(node, work)
        assert (await end(following)).code == 0
    assert (await shell.run("logs", "a-0", "--tail", "4")).out == "two\n"
