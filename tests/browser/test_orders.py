"""Orders and filters of the console's tables, and narrow windows, in a real Chromium."""

import pytest

from browser.busy import fill
from browser.chromium import Tab
from browser.conftest import check_accessibility, open_page, set_size
from browser.test_changes import FIRST, add, evaluate, train
from browser.test_runs import TEXT, put
from support.server import RunningServer
from support.tasks import make_task
from tugline.server.store import tasks
from tugline.server.store.base import Tx

pytestmark = pytest.mark.browser
CELLS = """[...document.querySelectorAll('tbody tr:not(.gap)')].map(
  row => [...row.cells].map(cell => cell.innerText.trim()))"""
CUT = """[...document.querySelectorAll('main *:not(.sr)')]
  .filter(each => each.scrollWidth > each.clientWidth + 1)
  .filter(each => getComputedStyle(each).overflowX !== 'visible')
  .map(each => each.tagName + ' ' + each.innerText)"""
"""Elements whose content is cut, or must be scrolled sideways."""


async def press(tab: Tab, heading: str) -> None:
    """Press a heading."""
    await tab.js(
        "[...document.querySelectorAll('th button')]"
        f".find(each => each.innerText.startsWith('{heading}')).click()"
    )


async def fill_rewards(server: RunningServer) -> None:
    """A run with three tasks, of which one waits, and sessions of another run."""
    await put(server, "mine", "run")
    await put(server, "other", "run")

    def fill(tx: Tx) -> None:
        add(tx, "mine", "easy", (1.0, 1.0, 0.5), kind="a")
        add(tx, "mine", "hard", (0.0, None), held_out="true")
        add(tx, "other", "else", (0.25,))
        tasks.submit(tx, [tasks.pack(make_task("waits", 3))], run="mine")

    await server.control.database.write(fill)


# --------------------------------------------------------------------------- sessions
async def test_sessions_are_sorted_and_filtered_by_reward(tab: Tab, server: RunningServer) -> None:
    """A heading sorts and reverses; a range of rewards is in the address."""
    await fill_rewards(server)
    await open_page(tab, server, "/sessions?run=mine", f"{CELLS}.length === 5")
    await press(tab, "reward")
    await tab.until("location.search === '?run=mine&sort=highest'")
    ids = f"{CELLS}.map(cells => cells[1]).join()"
    await tab.until(f"{ids} === 'easy-1,easy-0,easy-2,hard-0'")
    await press(tab, "reward")
    await tab.until(f"{ids} === 'hard-0,easy-2,easy-0,easy-1'")
    await tab.visit(f"{server.url}/sessions?min=0.25&max=0.5&sort=lowest")
    await tab.until(f"{ids} === 'else-0,easy-2'")
    assert await tab.js("document.querySelector('[aria-label=\"Least reward\"]').value") == "0.25"
    await press(tab, "seconds")
    await tab.until("location.search.includes('sort=longest')")
    await tab.visit(f"{server.url}/sessions?min=1&q=easy")
    await tab.until(f"{ids} === 'easy-1,easy-0'")
    orders = "[...document.querySelector('[aria-label=Order]').options].map(one => one.value)"
    assert await tab.js(orders) == ["newest", "oldest"]


async def test_a_queue_does_not_hide_what_has_ended(tab: Tab, server: RunningServer) -> None:
    """Sessions of a run are listed without those that wait, which are counted."""
    await fill_rewards(server)
    await open_page(tab, server, "/sessions?run=mine", f"{CELLS}.length === 5")
    assert "queued" not in [cells[0] for cells in await tab.js(CELLS)]
    await tab.until(f"{TEXT}.includes('3 queued sessions of the server not listed')")
    await tab.js("document.querySelector('a.caption').click()")
    await tab.until("location.search === '?run=mine&status=queued'")
    await tab.until(f"{CELLS}.map(cells => cells[1]).join() === 'waits-2,waits-1,waits-0'")


async def test_a_failed_session_opens_with_its_log(tab: Tab, server: RunningServer) -> None:
    """The log is inside the window without scrolling."""
    await fill(server)
    await set_size(tab, 1440)
    await open_page(tab, server, "/sessions?status=failed", f"{CELLS}.length === 2")
    await tab.js("document.querySelector('tbody a.mono').click()")
    await tab.until(f"{TEXT}.includes('2 failed, 5 passed')")
    box = "[...document.querySelectorAll('pre')].at(-1).getBoundingClientRect()"
    assert await tab.js(f"{box}.top > 0 && {box}.top < innerHeight - 100")


# --------------------------------------------------------------------------- tasks and groups
async def test_tasks_are_sorted_and_show_what_was_solved(tab: Tab, server: RunningServer) -> None:
    """Bars have solved, unsolved, failed and open sessions; held-out tasks are marked."""
    await fill_rewards(server)
    await open_page(tab, server, "/tasks", f"{CELLS}.length === 4 && {TEXT}.includes('66.7 %')")
    names = "[...document.querySelectorAll('tbody a.mono')].map(each => each.innerText).join()"
    assert await tab.js(names) == "waits,else,hard,easy"
    bars = "[...document.querySelectorAll('td .bar')].map(each => each.getAttribute('aria-label'))"
    assert await tab.js(bars) == [
        "open 3",
        "not solved 1",
        "not solved 1, without reward 1",
        "solved 2, not solved 1",
    ]
    marked = "[...document.querySelectorAll('.tag')].map(each => each.closest('td').innerText)"
    assert await tab.js(marked) == ["hard\nheld-out"]
    await press(tab, "pass@1")
    await tab.until("location.search === '?sort=-solved'")
    assert await tab.js(names) == "easy,else,hard,waits"
    assert await tab.js("document.querySelector('[aria-sort=descending]').innerText") == "pass@1 ↓"
    await press(tab, "task")
    await tab.until("location.search === '?sort=name'")
    assert await tab.js(names) == "easy,else,hard,waits"
    await tab.visit(f"{server.url}/tasks?by=problem")
    await tab.until(f"{CELLS}.length === 4")
    await press(tab, "problem")
    await tab.until(f"{names} === 'easy,else,hard,waits'")


async def test_the_samples_of_a_group_are_sorted(tab: Tab, server: RunningServer) -> None:
    """The highest reward is first; samples without a value stay last."""
    await fill_rewards(server)
    await open_page(tab, server, "/groups/easy", f"{CELLS}.length === 3")
    ids = f"{CELLS}.map(cells => cells[1]).join()"
    assert await tab.js(ids) == "easy-0,easy-1,easy-2"
    await press(tab, "reward")
    await tab.until(f"{ids} === 'easy-2,easy-0,easy-1'")
    await tab.visit(f"{server.url}/groups/hard?sort=reward")
    await tab.until(f"{ids} === 'hard-0,hard-1'")


# --------------------------------------------------------------------------- narrow windows
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_nothing_is_cut_in_a_narrow_window(
    tab: Tab, server: RunningServer, theme: str
) -> None:
    """Names of usual length are whole at 800 pixels, without scrolling sideways."""
    await train(server, "mine")
    await evaluate(server, "first", FIRST)
    await fill(server)
    await set_size(tab, 800)
    await tab.js(f"localStorage.setItem('theme', '{theme}')")
    for path in (
        "/",
        "/runs?compare=first,mine",
        "/training?run=mine&from=6&to=8",
        "/sessions?sort=highest",
        "/sessions?run=mine&min=0.5",
        "/tasks?sort=-solved",
        "/tasks?by=problem",
        "/groups/mine-g0000003-sql-0",
    ):
        await open_page(tab, server, path, "document.querySelector('tbody tr')")
        assert await tab.js(CUT) == [], path
        await check_accessibility(tab, path)
