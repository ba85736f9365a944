"""A trainer's main loop without the training: submit groups, learn from them, go on after any stop.

    tugline up &                       # a server, a node and an engine
    python examples/client.py task.yaml --rounds 3

The task is submitted once for each round, under an id of its own; its groups are learned from when
they are whole, and acknowledged. Stop the program at any moment and start it again: nothing is
submitted twice, and it goes on with the group that was not acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing

import msgspec

from tugline import Client, GroupResults, load_tasks

CONSUMER = "example"


def learn(group: GroupResults) -> None:
    """Where a trainer would make a batch of the trajectories."""
    rewards = [one.view.reward for one in group.results if one.view.reward is not None]
    trained = sum(
        int(trace.mask.sum())
        for one in group.results
        if one.trajectory is not None
        for trace in one.trajectory.traces
    )
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    missing = f", missing samples {list(group.view.missing)}" if group.view.missing else ""
    print(f"{group.view.id}: mean reward {mean:.3f}, {trained} tokens to train on{missing}")


async def main(path: str, rounds: int) -> None:
    """One group after the other."""
    (task,) = load_tasks([path])
    async with Client() as client:
        names = [f"{task.id}-round{number}" for number in range(rounds)]
        await client.submit([msgspec.structs.replace(task, id=name) for name in names])
        await client.wait(names)
        groups = client.groups(CONSUMER, tasks=names, follow=False)
        async with aclosing(groups):
            async for group in groups:
                learn(group)
                await client.ack(CONSUMER, group.cursor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a file with one task")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(main(options.path, options.rounds))
