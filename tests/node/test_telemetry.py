"""Traces of a node's sessions."""

from __future__ import annotations

from pathlib import Path

from support.deployment import deploy, read_samples, script_task
from support.polling import until
from tugline.node.telemetry import Rollout
from tugline.server.store import stats
from tugline.types import STAGES


class MemoryTracer:
    """A tracer that keeps what it exports, and fails for the task ``untraced``."""

    def __init__(self) -> None:
        self.exported: list[Rollout] = []

    def export(self, rollout: Rollout) -> None:
        """Keep the trace, or fail."""
        if rollout.task.id == "untraced":
            raise ValueError
        self.exported.append(rollout)


async def test_each_attempt_is_traced(tmp_path: Path) -> None:
    """A trace has the stages that the attempt reached, and its calls.

    A failed export is counted and fails no session.
    """
    tracer = MemoryTracer()
    async with deploy(tmp_path, tracer=tracer) as deployment:
        await deployment.run(
            script_task("good"), script_task("bad", "exit(3)"), script_task("untraced")
        )
        await until(lambda: deployment.node.stats.untraced and len(tracer.exported) == 3)
        page = read_samples(await deployment.metrics.render())
        sessions = (await deployment.control.database.read(stats.counts)).sessions
    assert page["tugline_node_untraced_total"] == {(): 1}
    assert sessions == {"completed": 2, "failed": 1}
    traced = sorted(tracer.exported, key=lambda each: (each.session.id, each.session.epoch))
    assert [one.session.id for one in traced] == ["bad-0", "bad-0", "good-0"]
    first, bad, good = traced
    assert bad.session.epoch > first.session.epoch
    assert [status for status, _ in good.stages] == list(STAGES)
    assert [status for status, _ in bad.stages] == list(STAGES[:4])
    assert (len(good.calls), len(bad.calls)) == (1, 0)
