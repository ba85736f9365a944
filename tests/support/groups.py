"""Graded groups on a real server."""

from __future__ import annotations

import numpy as np
import zstandard

from support.server import RestartableServer, lease_sessions
from support.tasks import make_task
from tugline.types import (
    Boundary,
    Distribution,
    Failure,
    Group,
    Ledger,
    Reward,
    Span,
    Status,
    Trace,
    Trajectory,
    encode,
)


def trajectory(
    session: str, of: str, sample: int, reward: float | None, traces: int = 1
) -> Trajectory:
    """Two answers around a tool result; the second one was sampled greedily, under version 4."""
    greedy = Distribution(temperature=0.0)
    spans = (Span(0, 2, 4, 3), Span(1, 5, 6, 4, distribution=greedy))
    mask = np.array([0, 0, 1, 1, 0, 1], np.bool_)
    trace = Trace(
        ids=np.arange(10, 16, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        spans=spans,
    )
    return Trajectory(
        session=session,
        task=of,
        sample=sample,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        traces=(trace,) * traces,
        ledger=Ledger(sampled=3 * traces, trained=3 * traces),
        reward=None if reward is None else Reward(reward, {"tests": reward}),
        failure=Failure(Boundary.INFRASTRUCTURE, "gone") if reward is None else None,
    )


ONCE = Group(attempts=1, retry_s=0)
"""Nothing is tried again."""


async def finish(live: RestartableServer, traces: int = 1, **tasks: list[float | None]) -> None:
    """Submit tasks, and commit sessions with these rewards, task by task."""
    async with live.client() as client:
        for name, rewards in tasks.items():
            await client.submit(make_task(name, samples=len(rewards), group=ONCE))
            async with lease_sessions(live.url, 99) as (node, _, *work):
                for of in (each.session for each in work):
                    done = trajectory(of.id, name, of.sample, rewards[of.sample], traces)
                    await node.commit(of.id, of.epoch, zstandard.compress(encode(done)))
