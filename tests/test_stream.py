"""The stream of graded groups, read from a real server by other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from msgspec.structs import replace

from support.commands import run_program
from support.groups import ONCE, finish, trajectory
from support.server import TOKENS, RestartableServer, lease_sessions
from support.tasks import make_task
from tugline.stream import GradedGroup, GroupStream
from tugline.types import Kept, Ledger, encode

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
    """All groups that are there now."""
    with stream:
        return list(stream)


async def read_groups(live: RestartableServer) -> list[GradedGroup]:
    """Three finished groups: one of mixed rewards, one of equal rewards, one of one session."""
    await finish(live, a=[1.0, 0.0, 1.0], b=[1.0, 1.0], c=[0.5])
    stream = GroupStream("me", live.url, TOKENS.client, follow=False)
    return await asyncio.to_thread(read, stream)


async def test_samples_are_flat_arrays(live: RestartableServer) -> None:
    """A sample has one value per token for mask, log probability, version and temperature."""
    a, b, c = await read_groups(live)
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


async def test_experts_and_kept_sets_pass_through(live: RestartableServer) -> None:
    """A trace has the arrays that the node committed, of the same types."""
    experts = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    kept = Kept.of([[], [], [12, 300], [13], [], []])
    done = trajectory("a-0", "a", 0, 1.0)
    traces = (replace(done.traces[0], experts=experts, kept=kept), done.traces[0])
    ledger = Ledger(sampled=6, trained=6)
    async with live.client() as client:
        await client.submit(make_task("a", group=ONCE))
        async with lease_sessions(live.url, 1) as (node, _, work):
            body = zstandard.compress(encode(replace(done, traces=traces, ledger=ledger)))
            await node.commit("a-0", work.session.epoch, body)
    stream = GroupStream("me", live.url, TOKENS.client, follow=False)
    (group,) = await asyncio.to_thread(read, stream)
    first, second = group.trajectories[0].traces
    assert first.experts is not None
    assert first.kept is not None
    assert first.experts.dtype == np.uint16
    assert np.array_equal(first.experts, experts)
    assert [each.tolist() for each in first.kept] == [each.tolist() for each in kept]
    assert (second.experts, second.kept) == (None, None)


async def test_equal_rewards_have_no_advantage(live: RestartableServer) -> None:
    """Mixed rewards are scaled by their deviation; a group of one session has no signal."""
    a, b, c = await read_groups(live)
    first = a.samples[0]
    scale = np.sqrt(1 / 3) + 1e-4  # deviation of the sample 1, 0, 0
    assert first.advantages.tolist() == pytest.approx([0, 0, 1 / 3 / scale, 1 / 3 / scale, 0, 0])
    assert all(not one.advantages.any() for one in (*b.samples, *c.samples))


async def test_sessions_without_a_reward_are_no_samples(live: RestartableServer) -> None:
    """A session without a reward is in `missing`, with its trajectory and failure."""
    await finish(live, a=[1.0, None])
    stream = GroupStream("me", live.url, TOKENS.client, follow=False)
    (group,) = await asyncio.to_thread(read, stream)
    assert [one.session for one in group.samples] == ["a-0"]
    assert [one.failure is None for one in group.trajectories] == [True, False]
    assert group.missing == (1,)


async def test_a_killed_consumer_resumes_at_its_last_acknowledgement(
    live: RestartableServer,
) -> None:
    """A group that was read but not acknowledged comes again; acknowledged ones do not.

    Restarting the server changes nothing.
    """
    await finish(live, a=[1.0, 0.0], b=[0.0, 1.0])
    first = await start_consumer(live)
    assert await read_line(first) == "a a-0 a-1"
    await acknowledge(first)
    assert await read_line(first) == "b b-0 b-1"
    first.send_signal(signal.SIGKILL)
    await first.wait()
    second = await start_consumer(live)
    assert await read_line(second) == "b b-0 b-1"
    await acknowledge(second)
    await live.stop()
    await live.start()
    await finish(live, c=[1.0, 0.0])
    assert await read_line(second) == "c c-0 c-1"
    await acknowledge(second)
    await finish(live, d=[1.0])  # is read once c is acknowledged
    assert await read_line(second) == "d d-0"
    second.send_signal(signal.SIGKILL)
    await second.wait()
    stream = GroupStream("trainer", live.url, TOKENS.client, follow=False)
    assert [one.id for one in await asyncio.to_thread(read, stream)] == ["d"]


async def start_consumer(live: RestartableServer) -> asyncio.subprocess.Process:
    """Start a consumer in its own process."""
    arguments = (sys.executable, "-c", CONSUMER, live.url, TOKENS.client)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)


async def read_line(process: asyncio.subprocess.Process) -> str:
    """The next group that it read, and its sessions; it logs to the same stream."""
    while not (line := await process.stdout.readline()).startswith(b"read "):
        assert line, "it has ended"
    return line.decode().removeprefix("read ").strip()


async def acknowledge(process: asyncio.subprocess.Process) -> None:
    """Let it acknowledge the group."""
    process.stdin.write(b"acknowledge\n")
    await process.stdin.drain()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_data_loader_reads_in_a_worker_process(live: RestartableServer) -> None:
    """The example acknowledges what its worker has read; the next run continues after it."""
    await finish(live, **{name: [1.0, 0.0] for name in "abcdefghijkl"})
    assert await run_example(live) == [f"{name} {name}-0=1 {name}-1=0" for name in "abcdefghijkl"]
    await finish(live, m=[1.0])
    assert await run_example(live) == ["m m-0=1"]


async def run_example(live: RestartableServer) -> list[str]:
    """The lines that it prints."""
    where = {"TUGLINE_SERVER": live.url, "TUGLINE_TOKEN": TOKENS.client}
    script = Path(__file__).parents[1] / "examples" / "torch_dataset.py"
    argv = (sys.executable, script, "mine")
    done = await asyncio.to_thread(run_program, *argv, env=os.environ | where, check=True)
    return done.stdout.splitlines()
