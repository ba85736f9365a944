"""Runs: registration, what belongs to them, and reports of trainers about their steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.control_plane import Earlier, IdleNode, Open, read_pages
from support.server import TASK, TOKENS, serve
from support.tasks import make_task
from tugline.errors import Conflict, Missing
from tugline.protocol import (
    EventKind,
    EventQuery,
    ResultQuery,
    RunKind,
    RunStart,
    RunStep,
    SessionQuery,
    StepQuery,
    TaskQuery,
)
from tugline.server.control import ControlPlane
from tugline.server.http.route import Person
from tugline.server.store import runs, sessions, tasks


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


async def test_some_figures_are_read_without_the_others(control: ControlPlane) -> None:
    """A page is full of steps that have them; steps without them do not end it early."""
    for step in range(10):
        name = "reward" if step % 3 == 0 else "kl"
        given = RunStep(step=step, figures={name: 1.0, "s": 2.0}, notes={"alarm": "x"})
        await control.database.write(runs.report_step, "a", given)
    query = StepQuery(limit=3, figure=("reward", "other"))
    steps = await control.database.read(runs.list_steps, "a", query)
    assert steps == [RunStep(step=step, figures={"reward": 1.0}) for step in (0, 3, 6)]
    steps = await control.database.read(runs.list_steps, "a", replace(query, after=6))
    assert [step.step for step in steps] == [9]


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


# --------------------------------------------------------------------------- registration
async def test_a_run_is_registered_continued_and_ended(control: ControlPlane) -> None:
    """A continued run keeps its start and has no end; its kind cannot change."""
    write = control.database.write
    first = await write(runs.start, "a", RunStart(kind=RunKind.EVAL, configuration={"k": 1}))
    assert (first.kind, first.configuration) == (RunKind.EVAL, {"k": 1})
    assert (first.ended, first.step) == (None, None)
    ended = await write(runs.end, "a")
    assert ended.ended is not None
    assert await write(runs.end, "a") == ended
    given = RunStart(kind=RunKind.EVAL, configuration={"k": 2}, parent="b", by="ann@here")
    again = await write(runs.start, "a", given)
    assert (again.created, again.ended, again.configuration) == (first.created, None, {"k": 2})
    assert (again.parent, again.by) == ("b", "ann@here")
    with pytest.raises(Conflict, match="run 'a' is of kind 'eval', not 'train'"):
        await write(runs.start, "a", RunStart(kind=RunKind.TRAIN))
    with pytest.raises(Missing, match="unknown run 'c'"):
        await write(runs.end, "c")
    [listed] = await control.database.read(runs.list_views)
    assert listed == replace(again, configuration={})
    events = await control.events(EventQuery(after=0, limit=1000))
    kinds = [event.kind for event in events]
    assert kinds == [EventKind.STARTED, EventKind.ENDED, EventKind.STARTED]


async def test_tasks_sessions_and_results_are_found_by_run(control: ControlPlane) -> None:
    """They belong to the run that they are submitted to; an unknown one is refused."""
    with pytest.raises(Missing, match="unknown run 'a'"):
        await control.submit([make_task("t")], "a")
    await control.database.write(runs.start, "a", RunStart(kind=RunKind.RUN))
    await control.submit([make_task("t", 2)], "a")
    node = await IdleNode.at_work(control, make_task("u"))
    for session in ("t-0", "t-1", "u-0"):
        await node.commit(session)
    assert await read_pages(control, tasks.page, TaskQuery(run="a")) == ["t"]
    assert await read_pages(control, sessions.page, SessionQuery(run="a")) == ["t-0", "t-1"]
    page = await control.results(ResultQuery(run="a"))
    assert [(item.session, item.run) for item in page.items] == [("t-0", "a"), ("t-1", "a")]
    groups = await control.results(ResultQuery(run="a", groups=True))
    assert [(group.id, group.run) for group in groups.groups] == [("t", "a")]
    later = time.time() + 60
    assert await control.database.write(runs.trim, later) == 0, "it has a task"
    assert await control.database.write(tasks.delete_finished, later) == 2
    assert await control.database.write(runs.trim, later) == 1


async def test_reports_of_an_earlier_store_are_runs(
    open_earlier: Earlier, open_control: Open
) -> None:
    """A migration registers the runs of trainers."""
    insert = "INSERT INTO run_steps VALUES ('a', :step, '{}', '{}', :at)"
    async with open_earlier(6) as database:
        for step in (1, 2):
            await database.write(lambda tx, n=step: tx.run(insert, step=n, at=float(n)))
    async with open_control() as control:
        [view] = await control.database.read(runs.list_views)
    assert (view.name, view.kind, view.step) == ("a", RunKind.TRAIN, 2)
    assert (view.created, view.updated) == (1.0, 2.0)


async def test_a_tenant_s_token_starts_only_its_own_runs(tmp_path: Path) -> None:
    """The name of a run is that of the tenant, or begins with it and a dot."""
    async with serve(f"sqlite:{tmp_path / 'db'}", tmp_path) as served:
        person = Person("ann-token", tenant="team")
        served.app.tokens = replace(TOKENS, people={"ann": person})
        body = {"kind": "run"}
        refused = await served.ask("PUT", "/v1/runs/mine", "ann-token", json=body)
        assert refused.refusal == (403, "forbidden")
        assert (await served.ask("PUT", "/v1/runs/team.a", "ann-token", json=body)).status == 200
        await served.ask("PUT", "/v1/runs/mine", json=body)
        tasks = [{**TASK, "tenant": "team"}]
        refused = await served.ask("POST", "/v1/tasks?run=mine", "ann-token", json=tasks)
        assert refused.refusal == (403, "forbidden")
        accepted = await served.ask("POST", "/v1/tasks?run=team.a", "ann-token", json=tasks)
        assert accepted.status == 201
        await served.submit(id="other")
        for path, work in (
            ("/v1/rejudge", {"run": "team.a", "sessions": ["other-0"]}),
            ("/v1/verdicts", {"sessions": {"other-0": 1}}),
        ):
            refused = await served.ask("POST", path, "ann-token", json=work)
            assert refused.refusal == (403, "forbidden")
