"""``tugline logs``: what an agent printed, to the end if followed."""

from __future__ import annotations

import asyncio
import os

from cli.conftest import Shell, end
from commands import TUGLINE
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


async def test_a_terminal_gets_no_escape_sequences(shell: Shell) -> None:
    """An agent cannot set the title, move the cursor or hide text; a file gets its bytes."""
    said = b"a\x1b]0;owned\x07b\xc2\x9b2Jc\xe2\x80\xaed\te \xff\n"
    await shell.house.control.submit([task("a")])
    async with NodeClient(shell.house.url, TOKENS.join) as node:
        welcome = await node.register(NodeRegistration(name="n", slots=1, capacity=1))
        (work,) = (await node.lease(welcome.node, LeaseRequest(capacity=1, wait_s=5.0))).work
        await node.log("a-0", work.session.epoch, 0, said)
    terminal, side = os.openpty()
    try:
        command = (TUGLINE, "logs", "a-0")
        output = await asyncio.create_subprocess_exec(*command, cwd=shell.folder, stdout=side)
        assert await asyncio.wait_for(output.wait(), 40) == 0
        text = os.read(terminal, 4096).decode()
    finally:
        os.close(side)
        os.close(terminal)
    assert text == "a\\x1b]0;owned\\x07b\\x9b2Jc\\u202ed\te \ufffd\r\n"
    piped = await shell.start("logs", "a-0")
    assert piped.stdout is not None
    assert await piped.stdout.read() == said
