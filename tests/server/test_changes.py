"""Results of runs by problem, what changed between runs, and sessions by reward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from support.control_plane import Earlier, IdleNode, Open, finish, read_pages, record_statements
from support.server import TOKENS, RunningServer
from support.tasks import make_task
from tugline.client.api import Client
from tugline.errors import Invalid, Missing
from tugline.protocol import (
    ChangeQuery,
    Changes,
    Measure,
    ProblemQuery,
    RunKind,
    RunStart,
    SessionOrder,
    SessionQuery,
)
from tugline.server.control import ControlPlane
from tugline.server.store import changes, problems, results, runs, sessions, tasks
from tugline.server.store.base import Tx
from tugline.server.store.problems import Scope
from tugline.trainers.evaluation import Attempt, compare
from tugline.types import Boundary, Group, Status


def start(tx: Tx, run: str, kind: RunKind = RunKind.TRAIN) -> None:
    """Register a run."""
    runs.start(tx, run, RunStart(kind=kind))


def add(
    tx: Tx, run: str, task: str, rewards: Sequence[float | None], *, version: int = 0, **tags: str
) -> None:
    """Submit a task to a run, and end its sessions with these rewards; None: failed."""
    made = make_task(task, len(rewards), tags=tags)
    tasks.submit(tx, [tasks.pack(made)], run=run)
    for sample, reward in enumerate(rewards):
        session = f"{task}-{sample}"
        tx.update("sessions", session, version=version)
        finish(tx, session, reward, "" if reward is not None else "it broke", seconds={"run": 1.0})


def check(names: Sequence[tuple[str, float | None, float | None]], read: Changes) -> None:
    """Check the names and values of the lists of problems, in order."""
    listed = [*read.unrewarded, *read.worse, *read.better]
    assert [(one.name, one.before, one.now) for one in listed] == [*names]


async def test_results_are_summed_by_problem(control: ControlPlane) -> None:
    """Submissions of a problem are one row, over a range of versions; the run must exist."""

    def fill(tx: Tx) -> None:
        start(tx, "a")
        add(tx, "a", "g0000001-mend", (1.0, 0.5, None), kind="bug")
        add(tx, "a", "my-g0000002-mend", (1.0,), version=1, kind="bug")
        add(tx, "a", "x", (0.0,), version=1, instance="lint", kind="style")
        add(tx, "a", "eval000001-lint2", (1.0,), version=1)
        tasks.submit(tx, [tasks.pack(make_task("g0000003-open"))], run="a")

    await control.database.write(fill)
    read = control.database.read
    scores = await read(problems.list_scores, Scope("a", held_out=False))
    rows = [(one.problem, one.tags, one.sessions, one.rewarded, one.solved) for one in scores]
    assert rows == [("lint", {"kind": "style"}, 1, 1, 0), ("mend", {"kind": "bug"}, 4, 3, 2)]
    assert [one.reward for one in scores] == [0.0, pytest.approx(2.5 / 3)]
    late = await read(problems.list_scores, Scope("a", first=1))
    assert [(one.problem, one.held_out) for one in late] == [
        ("lint", False),
        ("lint2", True),
        ("mend", False),
    ]
    assert late[-1].sessions == 1
    assert await read(problems.list_scores, Scope("a", last=0, held_out=True)) == []
    with pytest.raises(Missing, match="unknown run 'b'"):
        await read(problems.list_scores, Scope("b"))


async def test_the_last_evaluations_of_trainings_are_compared(control: ControlPlane) -> None:
    """The interval is that of `compare`; each task that changed has a pair of sessions."""
    earlier = {"a": (0.0, 0.0), "b": (1.0, 1.0), "c": (1.0, 0.0), "d": (0.0, 0.0)}
    now = {"a": (1.0, 1.0), "b": (1.0, 1.0), "c": (0.0, 0.0), "d": (0.0, 1.0)}

    def fill(tx: Tx) -> None:
        for run, last in (("first", earlier), ("second", now)):
            start(tx, run)
            for version, scores in ((0, dict.fromkeys(earlier, (0.0, 1.0))), (4, last)):
                for name, rewards in scores.items():
                    task = f"{run}-eval{version:06}-{name}"
                    add(tx, run, task, rewards, version=version, held_out="true")
            add(tx, run, f"{run}-g0000001-other", (0.0,), version=5)

    await control.database.write(fill)
    found = await control.database.read(changes.find, "second", ChangeQuery(before="first"))
    check([("c", 0.5, 0.0), ("a", 0.0, 1.0), ("d", 0.0, 0.5)], found)
    lists = ([Attempt(k, r) for k, v in each.items() for r in v] for each in (now, earlier))
    assert found.difference == compare(*lists).difference
    assert (found.now.first, found.now.last, found.now.held_out) == (4, 4, True)
    assert found.counts == {"better": 2, "worse": 1, "unrewarded": 0, "same": 1}
    assert found.worse[0].pair == ("first-eval000004-c-0", "second-eval000004-c-0")
    assert found.better[1].pair == ("first-eval000004-d-0", "second-eval000004-d-1")


async def test_other_runs_are_compared_as_a_whole(control: ControlPlane) -> None:
    """Evaluations have no held-out tasks; runs without a common task have no difference."""

    def fill(tx: Tx) -> None:
        start(tx, "first", RunKind.EVAL)
        start(tx, "second", RunKind.EVAL)
        add(tx, "first", "x1", (1.0, 0.0), instance="x")
        add(tx, "second", "x2", (1.0, 1.0), instance="x")
        start(tx, "third", RunKind.RUN)
        add(tx, "third", "y", (1.0,))

    await control.database.write(fill)
    read = control.database.read
    found = await read(changes.find, "second", ChangeQuery(before="first"))
    check([("x", 0.5, 1.0)], found)
    assert (found.before.value, found.now.value, found.now.held_out) == (0.5, 1.0, None)
    found = await read(changes.find, "third", ChangeQuery(before="first"))
    assert (found.difference, found.better) == (None, ())
    with pytest.raises(Missing, match="unknown run 'fourth'"):
        await read(changes.find, "third", ChangeQuery(before="fourth"))


async def test_versions_before_are_enough(control: ControlPlane) -> None:
    """A run is compared with its own earlier versions; a part with itself is refused."""

    def fill(tx: Tx) -> None:
        start(tx, "a")
        for step, reward in enumerate((0.0, 1.0, 1.0)):
            add(tx, "a", f"g{step:07}-mend", (reward,), version=step)

    await control.database.write(fill)
    read = control.database.read
    for query in (ChangeQuery(before_last=0), ChangeQuery(before_first=0, before_last=0)):
        found = await read(changes.find, "a", query)
        assert (found.before.sessions, found.now.sessions) == (1, 3)
        check([("mend", 0.0, pytest.approx(2 / 3))], found)
    assert (await read(changes.find, "a", ChangeQuery(before_first=1))).before.sessions == 2
    for query in (
        ChangeQuery(),
        ChangeQuery(before="a"),
        ChangeQuery(held_out=False),
        ChangeQuery(before_first=0),
        ChangeQuery(first=1, last=2, before_first=1, before_last=2),
    ):
        with pytest.raises(Invalid, match="before_first and before_last to other") as caught:
            await read(changes.find, "a", query)
        assert caught.value.field == "before"


async def test_a_broken_family_of_tasks_is_the_first_tag(control: ControlPlane) -> None:
    """Tags are compared even if other tasks were tried; held-out ones are left out."""

    def fill(tx: Tx) -> None:
        start(tx, "a")
        for step in range(8):
            broken = step >= 4
            for family, rewards in {
                "sql": (0.0, 0.0) if broken else (1.0, 0.5),
                "python": (0.5, 1.0),
                "bash": (None, None) if broken else (1.0, 1.0),
            }.items():
                task = f"g{step:07}-{family}{step}"
                add(tx, "a", task, rewards, version=step, family=family, split="train")
            add(tx, "a", f"eval{step:06}-x", (0.0,), version=step, family="sql", held_out="true")

    await control.database.write(fill)
    query = ChangeQuery(
        first=4, last=7, before_first=0, before_last=3, held_out=False, measure=Measure.REWARD
    )
    found = await control.database.read(changes.find, "a", query)
    assert [(one.name, one.before, one.now) for one in found.tags] == [
        ("family=bash", 1.0, None),
        ("family=sql", 0.75, 0.0),
        ("family=python", 0.75, 0.75),
    ]
    bash, sql, _ = found.tags
    assert (bash.sessions, bash.rewarded, bash.problems) == ((8, 8), (8, 0), (4, 0))
    assert sql.pair == ("g0000000-sql0-0", "g0000004-sql4-0")
    assert bash.pair == ("g0000000-bash0-0", "g0000004-bash4-0")
    assert found.counts == {"better": 0, "worse": 0, "unrewarded": 0, "same": 0}
    assert (found.before.sessions, found.now.rewarded) == (24, 16)


async def test_mean_rewards_of_problems_are_compared(control: ControlPlane) -> None:
    """A problem that lost all rewards is listed apart; rounding is no change."""

    def fill(tx: Tx) -> None:
        start(tx, "a")
        for step, scores in enumerate(
            [
                {"up": (0.2, 0.4), "down": (0.5,), "same": (0.1, 0.2), "lost": (1.0,)},
                {"up": (0.9,), "down": (0.1, 0.2), "same": (0.2, 0.1), "lost": (None,)},
            ]
        ):
            for name, rewards in scores.items():
                add(tx, "a", f"g{step:07}-{name}", rewards, version=step)

    await control.database.write(fill)
    query = ChangeQuery(first=1, before_last=0, held_out=False, measure=Measure.REWARD)
    found = await control.database.read(changes.find, "a", query)
    check(
        [
            ("lost", 1.0, None),
            ("down", 0.5, pytest.approx(0.15)),
            ("up", pytest.approx(0.3), pytest.approx(0.9)),
        ],
        found,
    )
    assert found.counts == {"better": 1, "worse": 1, "unrewarded": 1, "same": 1}
    assert found.unrewarded[0].pair == ("g0000000-lost-0", "g0000001-lost-0")
    assert found.better[0].pair == ("g0000000-up-0", "g0000001-up-0")
    assert found.difference is not None
    assert found.difference.value == pytest.approx((0.6 - 0.35) / 3)
    assert found.difference.tasks == 3
    some = await control.database.read(
        changes.find, "a", ChangeQuery(first=1, before_last=0, limit=1, held_out=False)
    )
    assert [len(each) for each in (some.better, some.worse, some.unrewarded)] == [0, 0, 1]


# --------------------------------------------------------------------------- sessions by reward
async def test_sessions_are_listed_by_reward_and_seconds(control: ControlPlane) -> None:
    """Pages have no gaps among equal rewards; the filter combines with every list."""

    def fill(tx: Tx) -> None:
        start(tx, "a", RunKind.RUN)
        for n in range(6):
            tasks.submit(tx, [tasks.pack(make_task(f"t{n}", 2))], run="a" if n % 2 else None)
            finish(tx, f"t{n}-0", n // 2 / 2, seconds={"run": 10.0 - n, "eval": 1.0})
            finish(tx, f"t{n}-1", failure="it broke")

    await control.database.write(fill)

    async def read(**query: object) -> list[str]:
        return await read_pages(control, sessions.page, SessionQuery(**query))

    highest = SessionOrder.HIGHEST
    expected = [f"t{n}-0" for n in (5, 4, 3, 2, 1, 0)]
    for limit in (1, 2, 100):
        assert await read(order=highest, limit=limit) == expected
        assert await read(order=SessionOrder.LOWEST, limit=limit) == expected[::-1]
        assert await read(order=SessionOrder.SHORTEST, limit=limit) == expected
        assert await read(order=SessionOrder.LONGEST, limit=limit) == expected[::-1]
    assert await read(order=highest, run="a") == ["t5-0", "t3-0", "t1-0"]
    assert await read(order=highest, status=Status.FAILED) == []
    assert (
        await read(order=highest, status=Status.COMPLETED, max_reward=0.5, limit=1) == expected[2:]
    )
    assert await read(min_reward=0.5, max_reward=0.5) == ["t2-0", "t3-0"]
    assert await read(min_reward=0.5, q="t3") == ["t3-0"]
    page = await control.database.read(
        sessions.page, SessionQuery(min_reward=1.0, recent=True, run="a")
    )
    assert [one.id for one in page.sessions] == ["t5-0"]


@pytest.mark.parametrize(
    ("status", "condition"),
    [(Status.COMPLETED, "COALESCE(status, '') = :status"), (Status.FAILED, "AND status = :status")],
)
async def test_completed_sessions_are_not_found_by_their_status(
    control: ControlPlane, status: Status, condition: str
) -> None:
    """Most sessions are completed: an index of the status would leave all of them to be sorted."""

    def read(tx: Tx) -> str:
        with record_statements(tx) as seen:
            query = SessionQuery(order=SessionOrder.LONGEST, status=status)
            sessions.page(tx, query)
        return seen[0]

    sql = await control.database.read(read)
    assert condition in sql
    assert sql.count(":status") == 1


@pytest.mark.parametrize("order", [SessionOrder.HIGHEST, SessionOrder.SHORTEST, None])
async def test_pages_go_on_if_their_last_session_changes(
    control: ControlPlane, order: SessionOrder | None
) -> None:
    """It runs again or is judged again between two pages: nothing is skipped or listed twice."""

    def fill(tx: Tx) -> None:
        for n in range(4):
            tx.now += 10.0
            tasks.submit(tx, [tasks.pack(make_task(f"t{n}"))])
            finish(tx, f"t{n}-0", n / 3, seconds={"run": 10.0 - n})

    await control.database.write(fill)
    for change in (
        {"reward": None, "seconds": None},
        {"reward": 0.9, "seconds": 7.5, "updated": control.database.clock() + 3600},
    ):
        query = SessionQuery(order=order, recent=order is None, limit=2)
        page = await control.database.read(sessions.page, query)
        first = [one.id for one in page.sessions]
        await control.database.write(
            lambda tx, at, to: tx.update("sessions", at, **to), first[1], change
        )
        rest = await read_pages(control, sessions.page, replace(query, after=page.next))
        assert [*first, *rest] == ["t3-0", "t2-0", "t1-0", "t0-0"]
        await control.database.write(
            lambda tx: tx.update("sessions", "t2-0", reward=2 / 3, seconds=8.0, updated=tx.now + 30)
        )


@pytest.mark.parametrize(
    "cursor", ["", "7", "x", "1.0,", ",3", "1.0,-3", "nan,3", "1e999,3", "1..0,3", "1.0,3,4"]
)
async def test_a_wrong_cursor_of_an_order_is_refused(control: ControlPlane, cursor: str) -> None:
    """The message names the field and what it must be."""
    query = SessionQuery(order=SessionOrder.HIGHEST, after=cursor)
    with pytest.raises(Invalid, match="must be the `next` of an earlier page") as caught:
        await control.database.read(sessions.page, query)
    assert caught.value.field == "after"


async def test_a_repeated_session_has_no_reward_meanwhile(control: ControlPlane) -> None:
    """What failed outside the policy and runs again leaves the sums until it ends."""
    await control.database.write(start, "a", RunKind.RUN)
    await control.submit([make_task("t", group=Group(attempts=1))], "a")
    node = await IdleNode.at_work(control)
    await node.commit("t-0", failure=Boundary.EVALUATOR, seconds={"run": 1.0})
    scope = Scope("a")
    [failed] = await control.database.read(problems.list_scores, scope)
    assert (failed.sessions, failed.rewarded, failed.reward) == (1, 0, None)
    assert await control.database.write(results.run_again, "t", "ann") == ("t-0",)
    assert await control.database.read(problems.list_scores, scope) == []
    await node.ask()
    await node.commit("t-0", reward=0.25)
    [ended] = await control.database.read(problems.list_scores, scope)
    assert (ended.rewarded, ended.reward) == (1, 0.25)


async def test_sessions_of_layout_7_get_their_rewards(
    open_earlier: Earlier, open_control: Open
) -> None:
    """They are compared and sorted like those of this release."""

    def fill(tx: Tx) -> None:
        start(tx, "a")
        add(tx, "a", "g0000001-mend", (1.0, 0.5, None), kind="bug")
        add(tx, "a", "x", (0.25,), instance="lint", held_out="true")

    async with open_earlier(7) as database:
        await database.write(fill)
    async with open_control() as control:
        scores = await control.database.read(problems.list_scores, Scope("a"))
        assert [(one.problem, one.held_out, one.sessions, one.reward) for one in scores] == [
            ("lint", True, 1, 0.25),
            ("mend", False, 3, 0.75),
        ]
        query = SessionQuery(order=SessionOrder.HIGHEST)
        listed = await read_pages(control, sessions.page, query)
        assert listed == ["g0000001-mend-0", "g0000001-mend-1", "x-0"]


# --------------------------------------------------------------------------- over HTTP
async def test_a_client_reads_problems_and_changes(server: RunningServer) -> None:
    """The queries reach the server; a wrong one names its field."""

    def fill(tx: Tx) -> None:
        start(tx, "a")
        for step, reward in enumerate((1.0, 0.0)):
            add(tx, "a", f"g{step:07}-mend", (reward,), version=step)

    await server.control.database.write(fill)
    async with Client(server.url, TOKENS.read) as client:
        [score] = await client.run_problems("a", ProblemQuery(last=0))
        assert (score.problem, score.reward) == ("mend", 1.0)
        found = await client.run_changes(
            "a", ChangeQuery(first=1, last=1, before_first=0, before_last=0, held_out=False)
        )
        assert [one.name for one in found.worse] == ["mend"]
    response = await server.ask("GET", "/v1/runs/a/changes?first=-1")
    assert response.status == 422
    assert "first" in str(response.json)
