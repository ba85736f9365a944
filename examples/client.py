"""The main loop of a trainer, without training: submit tasks, consume groups, resume after a stop.

    tugline up &                       # a server, a node and an engine
    python examples/client.py task.yaml --rounds 3

The task is submitted once for each round, with its own id. A group is consumed when it is complete,
and then acknowledged. The program can be stopped at any time and started again: nothing is
submitted twice, and it continues with the first group that is not acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing

import msgspec

from tugline import Client, GroupResults, load_tasks

CONSUMER = "example"


def learn(group: GroupResults) -> None:
    """Print a group; a trainer would make a batch of its trajectories."""
    rewards = [result.view.reward for result in group.results if result.view.reward is not None]
    trained = sum(
        trace.trained
        for result in group.results
        if result.trajectory is not None
        for trace in result.trajectory.traces
    )
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    missing = f", missing samples {list(group.view.missing)}" if group.view.missing else ""
    print(f"{group.view.id}: mean reward {mean:.3f}, {trained} tokens to train on{missing}")


async def main(path: str, rounds: int) -> None:
    """Submit the rounds, and consume their groups."""
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
    parser.add_argument("path", help="file with one task")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(main(options.path, options.rounds))
