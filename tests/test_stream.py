"""The stream of graded groups, from a real server to a loop in another process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from graded import finish
from house import House
from served import TOKENS
from tugline.stream import GradedGroup, GroupStream

CONSUMER = """
import sys
from tugline.stream import GroupStream

with GroupStream("trainer", sys.argv[1], sys.argv[2]) as stream:
    assert not {"torch", "transformers"} & set(sys.modules)
    for group in stream:
        print("read", group.id, *(sample.session for sample in group.samples), flush=True)
        if sys.stdin.readline() == "acknowledge\\n":
            stream.acknowledge(group)
"""


def read(stream: GroupStream) -> list[GradedGroup]:
    """Everything that is there now."""
    with stream:
        return list(stream)


async def test_a_group_has_all_that_a_trainer_needs(house: House) -> None:
    """Whole groups in flat arrays; no reward is made up, and equal ones have no advantage."""
    await finish(house, a=[1.0, 0.0, 1.0], b=[1.0, 1.0], c=[0.5])
    stream = GroupStream("me", house.url, TOKENS.client, follow=False)
    a, b, c = await asyncio.to_thread(read, stream)
    assert [one.id for one in (a, b, c)] == ["a", "b", "c"]
    assert [one.session for one in a.samples] == ["a-0", "a-1", "a-2"]
    assert [one.reward for one in a.samples] == [1.0, 0.0, 1.0]
    first = a.samples[0]
    assert (first.group, first.reward_parts) == ("a", {"tests": 1.0})
    assert first.input_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert first.loss_mask.tolist() == [False, False, True, True, False, False]
    assert first.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert first.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert first.temperatures.tolist() == [1, 1, 1, 1, 1, 0]
    scale = np.sqrt(2) / 3 + 1e-4
    assert first.advantages.tolist() == pytest.approx([0, 0, 1 / 3 / scale, 1 / 3 / scale, 0, 0])
    assert all(not one.advantages.any() for one in (*b.samples, *c.samples))


async def test_a_session_without_a_verdict_is_not_a_sample(house: House) -> None:
    """It is missing from its group, with its trajectory and its failure at hand."""
    await finish(house, a=[1.0, None])
    stream = GroupStream("me", house.url, TOKENS.client, follow=False)
    (group,) = await asyncio.to_thread(read, stream)
    assert [one.session for one in group.samples] == ["a-0"]
    assert [one.failure is None for one in group.trajectories] == [True, False]
    assert group.missing == (1,)


async def test_a_killed_consumer_gets_what_it_did_not_acknowledge(house: House) -> None:
    """Killed between reading and acknowledging it gets the group again; after that never.

    A server that restarts meanwhile changes nothing.
    """
    await finish(house, a=[1.0, 0.0], b=[0.0, 1.0])
    first = await start_consumer(house)
    assert await read_line(first) == "a a-0 a-1"
    await acknowledge(first)
    assert await read_line(first) == "b b-0 b-1"
    first.send_signal(signal.SIGKILL)
    await first.wait()
    second = await start_consumer(house)
    assert await read_line(second) == "b b-0 b-1"
    await acknowledge(second)
    await house.stop()
    await house.start()
    await finish(house, c=[1.0, 0.0])
    assert await read_line(second) == "c c-0 c-1"
    await acknowledge(second)
    await finish(house, d=[1.0])  # read once c is acknowledged
    assert await read_line(second) == "d d-0"
    second.send_signal(signal.SIGKILL)
    await second.wait()
    stream = GroupStream("trainer", house.url, TOKENS.client, follow=False)
    assert [one.id for one in await asyncio.to_thread(read, stream)] == ["d"]


async def start_consumer(house: House) -> asyncio.subprocess.Process:
    """A loop in a process of its own."""
    arguments = (sys.executable, "-c", CONSUMER, house.url, TOKENS.client)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)


async def read_line(process: asyncio.subprocess.Process) -> str:
    """The group that it read next, and its sessions; it logs to the same stream."""
    while not (line := await process.stdout.readline()).startswith(b"read "):
        assert line, "it has ended"
    return line.decode().removeprefix("read ").strip()


async def acknowledge(process: asyncio.subprocess.Process) -> None:
    """Let it acknowledge that."""
    process.stdin.write(b"acknowledge\n")
    await process.stdin.drain()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_data_loader_reads_ahead_in_a_process_of_its_own(house: House) -> None:
    """The loop of the example acknowledges what its worker has read; the next one goes on."""
    await finish(house, **{name: [1.0, 0.0] for name in "abcdefghijkl"})
    assert await run_example(house) == [f"{name} {name}-0=1 {name}-1=0" for name in "abcdefghijkl"]
    await finish(house, m=[1.0])
    assert await run_example(house) == ["m m-0=1"]


async def run_example(house: House) -> list[str]:
    """What it prints."""
    where = {"TUGLINE_SERVER": house.url, "TUGLINE_TOKEN": TOKENS.client}
    script = Path(__file__).parents[1] / "examples" / "torch_dataset.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, "mine", env=os.environ | where, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()
