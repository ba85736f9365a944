"""Which tasks changed: of a training over time, and between runs, in a real Chromium."""

from collections.abc import Sequence

import pytest

from browser.busy import HOSTILE, make_result
from browser.chromium import Tab
from browser.conftest import Evidence, check_accessibility, open_page, set_size
from browser.test_runs import TEXT, drag, heldout, put, report
from support.control_plane import finish
from support.server import RunningServer
from support.tasks import make_task
from tugline.server.store import tasks
from tugline.server.store.base import Tx
from tugline.trainers.evaluation import Attempt, compare
from tugline.types import Reward

pytestmark = pytest.mark.browser
STEPS = 8
FAMILIES = {"sql": 3, "python": 3, "bash": 2}
"""Tasks of each family, of which every step has one each."""
SECTION = "document.querySelector('[aria-label=\"Tasks that changed\"]')"
SECTION_TEXT = f"({SECTION}?.innerText ?? '')"


def rows(label: str) -> str:
    """The cells of a table of changes."""
    return (
        f"[...document.querySelectorAll('[aria-label=\"{label}\"] tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )


def add(
    tx: Tx, run: str, task: str, rewards: Sequence[float | None], version: int = 0, **tags: str
) -> None:
    """Submit a task to a run, and end its sessions with these rewards; None: failed."""
    made = make_task(task, len(rewards), tags=tags)
    tasks.submit(tx, [tasks.pack(made)], run=run)
    for sample, reward in enumerate(rewards):
        session = f"{task}-{sample}"
        tx.update("sessions", session, version=version)
        finish(tx, session, reward, "" if reward is not None else HOSTILE, seconds={"run": 1.0})


async def train(server: RunningServer, run: str) -> None:
    """A training of eight steps; from the sixth on, the grader of one family is broken."""
    await put(server, run)

    def fill(tx: Tx) -> None:
        for step in range(1, STEPS + 1):
            for family, size in FAMILIES.items():
                rewards = (0.0, 0.0) if family == "sql" and step >= 6 else (1.0, 0.5)
                name = f"{family}-{step % size}"
                tags = {"instance": name, "family": family}
                add(tx, run, f"{run}-g{step:07}-{name}", rewards, step - 1, **tags)

    await server.control.database.write(fill)
    for step in range(1, STEPS + 1):
        reward = 0.5 if step >= 6 else 0.75
        figures = {"version": step - 1.0, "rollout/reward": reward, "time/step_s": 100.0}
        await report(server, run, step, figures)


async def evaluate(server: RunningServer, run: str, last: dict[str, Sequence[float]]) -> None:
    """A training with two evaluations, of which the last one has these rewards."""
    await put(server, run)

    def fill(tx: Tx) -> None:
        for version, scores in ((0, dict.fromkeys(last, (0.0,))), (6, last)):
            for name, rewards in scores.items():
                tags = {"instance": name, "held_out": "true", "family": name.split("-")[0]}
                add(tx, run, f"{run}-eval{version:06}-{name}", rewards, version, **tags)

    await server.control.database.write(fill)
    for step in (0, 6):
        await report(server, run, step, heldout(step))
        await report(server, run, step, {"version": step, "rollout/reward": 0.5})


FIRST = {"sql-a": (1.0, 1.0), "sql-b": (1.0, 0.0), "bash-a": (0.0, 0.0), "bash-b": (1.0, 1.0)}
SECOND = {"sql-a": (0.0, 0.0), "sql-b": (1.0, 0.0), "bash-a": (0.0, 1.0), "bash-b": (1.0, 1.0)}


# --------------------------------------------------------------------------- training
async def test_a_zoom_says_which_tasks_fell(tab: Tab, server: RunningServer) -> None:
    """The steps of the zoom are compared with as many before them, by tag and by task."""
    await train(server, "mine")
    await open_page(tab, server, "/training", "document.querySelector('figure path.line')")
    await tab.until(f"{SECTION_TEXT}.includes('steps 5 to 8 against 1 to 4')")
    await drag(tab, "Reward", 5 / 7, 1.0)
    await tab.until(f"{SECTION_TEXT}.includes('steps 6 to 8 against 3 to 5')")
    await tab.until(f"{rows('Tags that changed')}.length === 3")
    [broken, *others] = await tab.js(rows("Tags that changed"))
    assert broken[:6] == ["family=sql", "0.750", "0", "−0.750", "3", "6"]  # noqa: RUF001 - a sign
    assert [row[:4] for row in others] == [
        [f"family={family}", "0.750", "0.750", "0.000"] for family in ("bash", "python")
    ]
    fell = await tab.js(rows("Tasks that fell"))
    assert [row[0] for row in fell] == ["sql-0", "sql-1", "sql-2"]
    assert fell[0][1:5] == ["0.750", "0", "−0.750", "2"]  # noqa: RUF001 - a sign
    assert "unchanged: 5" in await tab.js(SECTION_TEXT)
    link = "document.querySelector('[aria-label=\"Tasks that fell\"] a').getAttribute('href')"
    assert await tab.js(link) == "/compare/mine-g0000003-sql-0-0/mine-g0000006-sql-0-0"
    tags = link.replace("Tasks that fell", "Tags that changed")
    assert await tab.js(tags) == "/compare/mine-g0000003-sql-0-0/mine-g0000006-sql-0-0"
    await tab.visit(f"{server.url}/training?axis=version&from=0&to=1")
    await tab.until(f"{SECTION_TEXT}.includes('version 1 against 0')")
    await tab.until(f"{SECTION_TEXT}.includes('No task was tried in both stretches')")
    await tab.js(
        f"[...{SECTION}.querySelectorAll('button')].find(b => b.innerText === 'held-out').click()"
    )
    await tab.until("location.search.includes('tasks=heldout')")
    await tab.until(f"{SECTION_TEXT}.includes('No held-out session with a reward')")
    await tab.visit(f"{server.url}/training?from=3&to=3")
    await tab.until(f"{SECTION_TEXT}.includes('step 3 against 2')")
    await tab.visit(f"{server.url}/training?from=1&to=1")
    await tab.until(f"{SECTION_TEXT}.includes('two versions of the weights')")


async def test_tasks_without_a_reward_are_the_first(tab: Tab, server: RunningServer) -> None:
    """A family whose grader fails has no reward any more; a failed session is one click away."""
    await put(server, "mine")

    def fill(tx: Tx) -> None:
        for version in range(2):
            for name in ("sql-a", "sql-b", "bash-a", "bash-b"):
                broken = version == 1 and name.startswith("bash")
                rewards = (None, None) if broken else (1.0, float(version == 0))
                tags = {"instance": name, "family": name.split("-")[0]}
                add(tx, "mine", f"g{version:07}-{name}", rewards, version, **tags)

    await server.control.database.write(fill)
    await open_page(tab, server, "/training?run=mine", f"{rows('Tags that changed')}.length === 2")
    assert "version 1 against 0" in await tab.js(SECTION_TEXT)
    bash, sql = await tab.js(rows("Tags that changed"))
    assert bash[:6] == ["family=bash", "1", "none", "no reward", "2 → 0", "4"]
    assert bash[6:] == ["0 → 4", "session"]
    assert sql[:4] == ["family=sql", "1", "0.500", "−0.500"]  # noqa: RUF001 - a sign
    fell = await tab.js(rows("Tasks that fell"))
    assert [row[0] for row in fell] == ["bash-a", "bash-b", "sql-a", "sql-b"]
    await tab.js("document.querySelector('[aria-label=\"Tasks that fell\"] a').click()")
    await tab.until("location.pathname === '/sessions/g0000001-bash-a-0'")


async def test_lines_are_smoothed(tab: Tab, server: RunningServer) -> None:
    """The average is without bias to 0 at the begin, and beside the raw value; it is in the URL."""
    await train(server, "mine")
    await open_page(tab, server, "/training", "document.querySelector('figure path.line')")
    assert await tab.js("document.querySelector('path.average')") is None
    await tab.js(
        """(() => { const box = [...document.querySelectorAll('select')].at(-1);
          box.value = '0.6'; box.dispatchEvent(new Event('change', {bubbles: true})); })()"""
    )
    await tab.until("location.search === '?smooth=0.6'")
    await tab.until("document.querySelector('path.average')")
    rewards = [0.75] * 5 + [0.5] * 3
    average, weight = 0.0, 0.0
    for reward in rewards:
        average = 0.6 * average + 0.4 * reward
        weight = 0.6 * weight + 0.4
    assert weight < 1
    caption = "document.querySelector('figure .caption').innerText"
    await tab.js(
        """(() => { const svg = document.querySelector('figure svg');
          const box = svg.getBoundingClientRect();
          svg.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: box.right - 16,
            clientY: box.y + 50})); })()"""
    )
    await tab.until(f"{caption}.includes('step 8')")
    assert f"{average / weight:.3f}, raw 0.500" in await tab.js(caption)
    await tab.visit(f"{server.url}/runs?compare=mine&smooth=0.9")
    await tab.until("document.querySelectorAll('path.average').length === 1")


# --------------------------------------------------------------------------- runs
async def test_two_runs_are_compared_task_by_task(tab: Tab, server: RunningServer) -> None:
    """The difference is that of `tugline eval`; the tasks that flipped have their rates."""
    await evaluate(server, "first", FIRST)
    await evaluate(server, "second", SECOND)
    text = await open_page(
        tab, server, "/runs?compare=first,second", f"{TEXT}.includes('common tasks')"
    )
    lists = ([Attempt(k, r) for k, v in run.items() for r in v] for run in (SECOND, FIRST))
    change = compare(*lists).difference
    low, high = (f"{abs(100 * value):.0f} pp" for value in (change.low, change.high))
    assert f"On 4 common tasks: −13 pp (−{low} to +{high}, 95 %)" in text  # noqa: RUF001 - signs
    assert "1 better, 1 worse, 2 the same" in text
    assert "4 held-out tasks, 8 sessions, version 6" in text
    [worse] = await tab.js(rows("Worse tasks"))
    assert worse[:4] == ["sql-a", "100 %", "0 %", "−100 pp"]  # noqa: RUF001 - a sign
    [better] = await tab.js(rows("Better tasks"))
    assert better[:4] == ["bash-a", "0 %", "50 %", "+50 pp"]
    link = "document.querySelector('[aria-label=\"Better tasks\"] a').getAttribute('href')"
    assert await tab.js(link) == "/compare/first-eval000006-bash-a-0/second-eval000006-bash-a-1"
    await put(server, "other", "eval")
    await tab.visit(f"{server.url}/runs?compare=first,other")
    await tab.until(f"{TEXT}.includes('no task with a reward in common')")


async def test_runs_are_drawn_over_versions_and_hours(tab: Tab, server: RunningServer) -> None:
    """The axis of their charts is chosen as on the training page."""
    await train(server, "mine")
    await open_page(tab, server, "/runs?compare=mine", "document.querySelector('figure path.line')")
    columns = "[...document.querySelectorAll('figure .column')].map(one => one.textContent).join()"
    assert await tab.js(columns) == "2,4,6,8"
    for axis, ticks in (("versions", "0,2,4,6"), ("hours", "0.05,0.10,0.15,0.20")):
        await tab.js(
            f"[...document.querySelectorAll('button')].find(b => b.innerText === '{axis}').click()"
        )
        await tab.until(f"{columns} === '{ticks}'")


async def test_the_link_of_a_task_opens_both_sessions(tab: Tab, evidence: Evidence) -> None:
    """The link of a task opens the comparison of both sessions."""
    await put(evidence.server, "a", "eval")
    await put(evidence.server, "b", "eval")
    for run, reward in (("a", 1.0), ("b", 0.0)):
        [work] = await evidence.lease(f"{run}-task", 1, run, instance="task")
        await evidence.commit(work, make_result(work, 0), reward=Reward(reward))
    await open_page(tab, evidence.server, "/runs?compare=a,b", f"{TEXT}.includes('side by side')")
    await tab.js("document.querySelector('[aria-label=\"Worse tasks\"] a').click()")
    await tab.until("location.pathname === '/compare/a-task-0/b-task-0'")
    await tab.until(f"{TEXT}.includes('b-task-0')")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 800])
async def test_the_tables_are_accessible(
    tab: Tab, server: RunningServer, theme: str, width: int
) -> None:
    """Both pages follow every rule of axe and fit, in either theme."""
    await train(server, "mine")
    await evaluate(server, "first", FIRST)
    await evaluate(server, "second", SECOND)
    await set_size(tab, width)
    await tab.js(f"localStorage.setItem('theme', '{theme}')")
    for path, ready in {
        "/training?run=mine&from=6&to=8&smooth=0.8": f"{rows('Tasks that fell')}.length === 3",
        "/runs?compare=first,second": f"{rows('Worse tasks')}.length === 1",
    }.items():
        await open_page(tab, server, path, ready)
        await check_accessibility(tab, path)
