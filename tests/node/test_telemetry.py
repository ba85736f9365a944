"""Traces of a node's sessions."""

from __future__ import annotations

import re
from pathlib import Path

from observed import observed, task
from rig import until
from tugline.node.telemetry import Rollout
from tugline.server.store import stats
from tugline.types import Status


class MemoryTracer:
    """A tracer that keeps what it exports, or cannot."""

    def __init__(self, *, broken: bool = False) -> None:
        self.exported: list[Rollout] = []
        self.broken = broken

    def export(self, rollout: Rollout) -> None:
        """Keep it."""
        if self.broken:
            raise ValueError
        self.exported.append(rollout)

    def close(self) -> None:
        """Nothing is left to send."""


async def test_each_attempt_is_traced_with_its_stages_and_calls(tmp_path: Path) -> None:
    """Of one that completes all stages, of one that fails those it had; each with its calls."""
    tracer = MemoryTracer()
    async with observed(tmp_path, tracer=tracer) as rig:
        await rig.run(task("good"), task("bad", "exit(3)"))
    traced = sorted(tracer.exported, key=lambda one: (one.session.id, one.session.epoch))
    assert [one.session.id for one in traced] == ["bad-0", "bad-0", "good-0"]
    first, bad, good = traced
    assert bad.session.epoch > first.session.epoch
    stages = [Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL]
    assert [status for status, _ in good.stages] == stages
    assert [status for status, _ in bad.stages] == stages[:4]
    times = [at for _, at in good.stages] + [good.ended]
    assert times == sorted(times)
    assert len(good.calls) == 1
    assert len(bad.calls) == 0
    assert good.trajectory.status is Status.COMPLETED


async def test_traces_that_break_cost_no_session(tmp_path: Path) -> None:
    """The session completes, and the page says that it has no trace."""
    async with observed(tmp_path, tracer=MemoryTracer(broken=True)) as rig:
        await rig.run(task("good"))
        await until(lambda: rig.node.stats.untraced > 0)
        page = await rig.metrics.render()
        assert (await rig.control.database.read(stats.counts)).sessions == {"completed": 1}
    assert re.search(rb"^tugline_node_untraced_total 1\.0$", page, re.MULTILINE)
