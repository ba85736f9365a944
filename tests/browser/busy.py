"""Fill a server with sessions that have completed, have failed, run, and wait."""

import io

import msgspec
import zstandard

from support.server import RunningServer
from tugline.protocol import HeldSession, NodeRegistered, Work
from tugline.types import (
    Boundary,
    Cause,
    Failure,
    Ledger,
    Reason,
    Reward,
    Status,
    Trajectory,
    encode,
)

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>{@html 3}\u202e"
"""Text of an agent that must not become markup."""
_FAILURES = (
    Failure(Boundary.AGENT, "the agent ran for 600 s", Cause.AGENT_TIMEOUT),
    Failure(Boundary.ENGINE, f"the engine refused the request: {HOSTILE}", Cause.ENGINE),
    Failure(Boundary.EVALUATOR, "the tests wrote no report", Cause.EVALUATOR),
    Failure(Boundary.AGENT, "the agent ran for 600 s", Cause.AGENT_TIMEOUT),
)
_STAGES = (Status.RUN, Status.RUN, Status.EVAL, Status.RUN, Status.INIT, Status.BUILD)


async def commit(
    server: RunningServer, node: NodeRegistered, trajectory: Trajectory, epoch: int
) -> None:
    """Commit the trajectory of a session."""
    data = io.BytesIO(zstandard.compress(encode(trajectory)))
    response = await server.commit(node, trajectory.session, epoch, data)
    assert response.json == {"outcome": "committed"}, response


async def append_log(server: RunningServer, node: NodeRegistered, work: Work, text: str) -> None:
    """Write the start of a session's log."""
    path = f"/v1/sessions/{work.session.id}/log?epoch={work.session.epoch}&offset=0"
    response = await server.ask("POST", path, node.token, data=text.encode())
    assert response.status == 200, response


def make_result(work: Work, n: int) -> Trajectory:
    """The result of a session; every seventh one fails."""
    failure = _FAILURES[n // 7 % len(_FAILURES)] if n % 7 == 6 else None
    late = failure is not None and failure.cause is Cause.AGENT_TIMEOUT
    sampled = 900 + 613 * n % 2900
    ended = Status.TIMED_OUT if late else Status.FAILED if failure else Status.COMPLETED
    return Trajectory(
        session=work.session.id,
        task=work.task.id,
        sample=work.session.sample,
        status=ended,
        traces=(),
        ledger=Ledger(sampled, dropped={Reason.ABORTED: sampled}),
        reward=Reward(0.0 if late else float(n % 5 in {0, 1, 3})) if late or not failure else None,
        failure=failure,
        seconds={"init": 1.2, "ready": 0.3, "run": 20.0 + 7 * n % 60, "build": 0.4, "eval": 3.1},
    )


async def fill(server: RunningServer) -> list[NodeRegistered]:
    """Six tasks of eight samples: most have ended, six sessions run on two nodes, two wait."""
    for name in ("fix-add", "parse-dates", "lru-cache", "json-diff", "retry-policy", "csv-quotes"):
        await server.submit(id=name, samples=8, tags={"set": "mend", "level": str(len(name) % 3)})
    nodes = [await server.join(name) for name in ("alpha", "beta")]
    n = 0
    for node in nodes * 2 + nodes[:1]:
        for work in (await server.lease(node)).work:
            log = f"\x1b[31m$ pytest\x1b[0m\n{HOSTILE}\n2 failed, 5 passed\n"
            await append_log(server, node, work, log)
            await commit(server, node, make_result(work, n), work.session.epoch)
            n += 1
    for node, stages in zip(nodes, (_STAGES[:4], _STAGES[4:]), strict=True):
        work = (await server.lease(node, len(stages))).work
        held = [
            HeldSession(each.session.id, each.session.epoch, stage)
            for each, stage in zip(work, stages, strict=True)
        ]
        body, path = {"held": msgspec.to_builtins(held)}, f"/v1/nodes/{node.node}/renew"
        response = await server.ask("POST", path, node.token, json=body)
        assert response.status == 200, response
    return nodes
