"""Reports of trainers about their steps."""

from __future__ import annotations

import time

from tugline.protocol import EventQuery, RunStep, StepQuery
from tugline.server.control import ControlPlane
from tugline.server.store import runs


async def get_steps(control: ControlPlane, run: str, after: int = -1) -> dict[int, RunStep]:
    """Steps by number."""
    steps = await control.database.read(runs.list_steps, run, StepQuery(after=after))
    return {one.step: one for one in steps}


async def test_reports_of_a_step_are_merged(control: ControlPlane) -> None:
    """Figures and notes of one step may come separately; repeating a report changes nothing."""
    write = control.database.write
    for _ in range(2):
        await write(runs.report_step, "a", RunStep(step=1, figures={"reward": 0.25, "kl": 0.0}))
        await write(runs.report_step, "a", RunStep(step=1, figures={"reward": 0.5}))
        await write(runs.report_step, "a", RunStep(step=1, notes={"alarm": "no signal"}))
    await write(runs.report_step, "a", RunStep(step=2, figures={"reward": 0.75}))
    await write(runs.report_step, "b", RunStep(step=7, figures={"reward": 1.0}))
    assert await get_steps(control, "a") == {
        1: RunStep(step=1, figures={"reward": 0.5, "kl": 0.0}, notes={"alarm": "no signal"}),
        2: RunStep(step=2, figures={"reward": 0.75}),
    }
    assert list(await get_steps(control, "a", after=1)) == [2]
    views = await control.database.read(runs.list_views)
    assert [(one.name, one.step) for one in views] == [("b", 7), ("a", 2)]
    events = await control.events(EventQuery(after=0, limit=1000))
    assert events[-1].detail == {"run": "b", "step": 7}


async def test_a_rewound_run_drops_later_steps(control: ControlPlane) -> None:
    """A resumed trainer continues after its checkpoint and repeats the later steps."""
    for step in range(1, 5):
        await control.database.write(runs.report_step, "a", RunStep(step=step, figures={"x": 1.0}))
    await control.database.write(runs.report_step, "a", RunStep(step=2, rewound=True))
    assert await get_steps(control, "a") == {n: RunStep(step=n, figures={"x": 1.0}) for n in (1, 2)}
    assert [one.step for one in await control.database.read(runs.list_views)] == [2]


async def test_old_runs_are_deleted(control: ControlPlane) -> None:
    """Runs are deleted as a whole: one that still reports keeps its first steps."""
    await control.database.write(runs.report_step, "old", RunStep(step=1))
    between = time.time()
    await control.database.write(runs.report_step, "new", RunStep(step=1))
    assert await control.database.write(runs.trim, between) == 1
    assert [one.name for one in await control.database.read(runs.list_views)] == ["new"]
