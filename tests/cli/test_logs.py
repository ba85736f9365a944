"""``tugline logs``, in a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import os

from cli.conftest import TUGLINE, Shell, end
from support.server import commit
from support.tasks import make_task


async def test_a_log_is_printed_and_followed(shell: Shell) -> None:
    """A log is printed unchanged; ``-f`` ends with the session."""
    async with shell.lease(make_task("a")) as (node, [work]):
        epoch = work.session.epoch
        await node.log("a-0", epoch, 0, b"one\n")
        following = await shell.start("logs", "-f", "a-0")
        assert await following.stdout.readline() == b"one\n"
        await node.log("a-0", epoch, 4, b"two\n")
        assert await following.stdout.readline() == b"two\n"
        await commit(node, work)
        await end(following)


async def test_a_terminal_gets_no_escape_sequences(shell: Shell) -> None:
    """An agent cannot set the title, move the cursor or hide text; a pipe gets the raw bytes."""
    logged = b"a\x1b]0;owned\x07b\xc2\x9b2Jc\xe2\x80\xaed\te \xff\n"
    async with shell.lease(make_task("a")) as (node, [work]):
        await node.log("a-0", work.session.epoch, 0, logged)
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
    assert await piped.stdout.read() == logged
    assert (await shell.run("logs", "a-0", "--tail", "1")).stdout == "\n"
