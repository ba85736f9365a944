"""Questions about a real training, each answered in the console by at most three clicks.

The causes are planted (``planted/``): a grader that breaks, a grader that becomes slow, an agent
that begins to ask once more, and a second training whose grader refuses two tasks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from browser.chromium import Tab, chromium
from browser.test_runs import point
from chaos.fleet import until
from support.commands import TUGLINE, run_program

pytestmark = [pytest.mark.browser, pytest.mark.nightly, pytest.mark.timeout(900)]
HERE = Path(__file__).parent / "planted"
TUTORIAL = Path(__file__).parents[2] / "docs/start/train-your-agent.md"
AGENT = re.compile(r'^```python title="agent.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PLANTED = {
    "while True:\n": """asks = (Path(__file__).parent / "asking" / "now").exists()
while True:
""",
    "    if not calls:\n": """    if not calls and asks:
        messages.append({"role": "user", "content": "Is it done?"})
        ask(messages)
    if not calls:
""",
}
"""Changes of the tutorial's agent."""


def write_files(folder: Path) -> None:
    """Write the planted tasks, configurations and agent."""
    (found,) = AGENT.findall(TUTORIAL.read_text(encoding="utf-8"))
    for old, new in PLANTED.items():
        assert found.count(old) == 1
        found = found.replace(old, new)
    (folder / "agent.py").write_text(found, encoding="utf-8")
    (folder / "asking").mkdir()
    shutil.copy(HERE / "planted.py", folder)
    for file in HERE.glob("*.yaml"):
        text = file.read_text(encoding="utf-8").replace("FOLDER", str(folder))
        (folder / file.name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two trainings by ``tugline train``, a few minutes of work."""
    folder = tmp_path_factory.mktemp("planted")
    write_files(folder)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for file, out in (("train.yaml", "runs/first"), ("strict.yaml", "runs/strict")):
        (folder / "asking" / "now").unlink(missing_ok=True)
        argv = [TUGLINE, "train", file, "--out", out, "--no-console"]
        done = run_program(*argv, cwd=folder, env=env, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs"


@pytest.fixture(scope="module")
def console(trained: Path) -> Iterator[str]:
    """The address, with its token, of the console of both runs."""
    log = trained.parent / "up.log"
    with log.open("wb") as out:
        argv = [TUGLINE, "up", "--dir", "runs", "--port", "0"]
        server = subprocess.Popen(argv, cwd=trained.parent, stdout=out, stderr=out)
    link = re.compile(r"the console is at (\S+)")
    try:
        until(lambda: link.search(log.read_text()) or server.poll() is not None, "the console")
        found = link.search(log.read_text())
        assert found, log.read_text()
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


class Clicks:
    """A page on which clicks are counted."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.count = 0

    async def click(self, what: str) -> None:
        """Click on the element of an expression, once it is there."""
        await self.tab.until(what)
        await self.tab.js(f"{what}.click()")
        self.count += 1

    async def read(self, contains: str) -> str:
        """Return the text of the page once it contains a text; three clicks at most were made."""
        await self.tab.until(f"document.querySelector('main').innerText.includes({contains!r})")
        assert self.count <= 3
        return str(await self.tab.js("document.querySelector('main').innerText"))


@pytest.fixture
async def page(console: str, tmp_path: Path) -> AsyncIterator[Clicks]:
    """The console's first page."""
    async with chromium(tmp_path / "profile") as tab:
        await tab.visit(console)
        yield Clicks(tab)
        assert tab.errors == []


ROWS = """[...document.querySelectorAll("[aria-label='{label}'] tbody tr")].map(
  row => [...row.cells].map(cell => cell.innerText.trim()))"""


def find_link(run: str) -> str:
    """Expression for the link of a run."""
    return f"[...document.querySelectorAll('.list a')].find(a => a.innerText.startsWith('{run}-'))"


async def read_rows(page: Clicks, label: str) -> list[list[str]]:
    """Read a table by its label, once it has rows."""
    rows = ROWS.format(label=label)
    await page.tab.until(f"{rows}.length")
    return list(await page.tab.js(rows))


async def open_training(page: Clicks) -> None:
    """Open the page of the first training: one click."""
    await page.click(find_link("first"))
    await page.tab.until("document.querySelectorAll('figure path.line').length")


async def brush(page: Clicks, first: int, last: int) -> None:
    """Drag from one step to another in the chart of the reward, which counts as a click."""
    steps = 44
    for kind, step in (("mousedown", first), ("mousemove", last), ("mouseup", last)):
        await point(page.tab, kind, "Reward", step / steps)
    await page.tab.until(f"location.search.includes('from={first}&to={last}')")
    page.count += 1


async def test_why_did_the_reward_drop_at_step_40(page: Clicks) -> None:
    """One family's tasks fell, and no other: its grader is broken."""
    await open_training(page)
    await brush(page, 40, 44)
    await page.read("steps 40 to 44 against 35 to 39")
    tag, before, after, change, *_ = (await read_rows(page, "Tags that changed"))[0]
    assert (tag, float(after)) == ("family=builtin", 0.0)
    assert float(before) > 0.5
    assert change.startswith("\N{MINUS SIGN}")
    fallen = [row[0] for row in await read_rows(page, "Tasks that fell")]
    builtin = [f"train-0-{n}" for n in (2, 8, 14, 20)]
    assert set(builtin) >= set(fallen[:3])


async def test_which_tasks_flip_between_two_runs(page: Clicks) -> None:
    """Both tasks that the second run's grader refuses are named, with the configuration."""
    for run in ("first", "strict"):
        await page.click(f"document.querySelector('[aria-label^=\"Compare {run}-\"]')")
    await page.read("Paired comparison")
    worse = {row[0]: row[1:4] for row in await read_rows(page, "Worse tasks")}
    for task in ("heldout-1000003-0", "heldout-1000003-1"):
        assert worse[task][1] == "0 %"
    assert "heldout.taskset.options.strict" in await page.read("Configuration:")


async def test_what_does_the_agent_do_differently_after_step_20(page: Clicks) -> None:
    """A pair of sessions shows that it asks once more whether it is done."""
    await open_training(page)
    await brush(page, 21, 30)
    link = (
        "[...document.querySelectorAll('section a')].find(a => a.innerText.includes('pair of s'))"
    )
    await page.click(link)
    text = await page.read("Is it done?")
    assert "Turn" in text or "turn" in text


async def test_is_it_engine_sandbox_or_evaluator(page: Clicks) -> None:
    """From step 30 on it is the evaluator; a sentence says so."""
    await open_training(page)
    await brush(page, 31, 39)
    text = await page.read("valuation takes")
    assert re.search(r"[Ee]valuation takes \d+ % (of a session's time )?\(\d", text), text


async def test_what_did_a_solved_task_cost(page: Clicks) -> None:
    """The list of runs has the cost of each run and of a solved task, without a click."""
    text = await page.read("per solved task")
    found = re.search(r"([\d.e-]+), ([\d.e-]+) per solved task", text)
    assert found
    assert 0 < float(found[2]) < float(found[1])
