"""The console's pages of runs and of training, in a real Chromium, with simulated figures."""

import asyncio
import math
from typing import Any

import pytest

from browser.busy import HOSTILE, make_result
from browser.chromium import Tab
from browser.conftest import Evidence, check_accessibility, open_page, set_size
from support.server import TOKENS, RunningServer
from tugline.types import Boundary, Cause, Failure, Ledger, Reason, Reward, Status

pytestmark = pytest.mark.browser
STEPS = 12
TEXT = "document.querySelector('main').innerText"
TITLES = "[...document.querySelectorAll('figure strong')].map(each => each.innerText)"
TICKS = """[...document.querySelectorAll('figure')].map(
  figure => [...figure.querySelectorAll('.column')].map(text => text.textContent).join(' '))"""
CELLS = """[...document.querySelectorAll('.list tbody tr')].map(
  row => [...row.cells].map(cell => cell.innerText.trim()))"""
_SERVES = """fetch("/v1/weights", {{headers: {{authorization: "Bearer {token}"}}}})
  .then((response) => response.json()).then((weights) => weights.version === {version})"""
_FIGURE = "[...document.querySelectorAll('figure')].find(f => f.innerText.startsWith({title!r}))"


async def put(server: RunningServer, run: str, kind: str = "train", **fields: Any) -> None:
    """Register a run."""
    response = await server.ask("PUT", f"/v1/runs/{run}", json={"kind": kind, **fields})
    assert response.status == 200, response


async def report(
    server: RunningServer,
    run: str,
    step: int,
    figures: dict[str, float],
    notes: dict[str, str] | None = None,
) -> None:
    """Report a step, as a trainer does."""
    body = {"step": step, "figures": figures, "notes": notes or {}}
    response = await server.ask("POST", f"/v1/runs/{run}/steps", json=body)
    assert response.status == 204, response


def figures_of(step: int, gain: float = 0.05) -> dict[str, float]:
    """Simulated figures of a step, with the names of a real trainer."""
    done = 1 - math.exp(-gain * step)
    return {
        "version": step - 1,
        "rollout/sessions": 64,
        "rollout/sampled": 57_333 + 900 * step,
        "rollout/reward": 0.2 + 0.7 * done,
        "rollout/failed": step % 3,
        "rollout/groups": 8,
        "rollout/signal": 6 - step % 3,
        "rollout/entropy": 1.2 - 0.5 * done,
        "rollout/staleness": 0.4,
        "rollout/staleness_max": 2,
        "update/kl": 0.001 * step,
        "update/clip_fraction": 0.01 + 0.002 * (step % 4),
        "update/grad_norm": 0.3 + 0.02 * (step % 5),
        "update/mismatch/total/mean_abs": 0.0021,
        "update/mismatch/total/p99_abs": 0.031,
        "update/ledger/trained": 50_000 + 800 * step,
        "update/ledger/masked/side_call": 4000,
        "update/ledger/dropped/aborted": 3333,
        "publish/seconds": 2.5,
        "time/wait_s": 300 + 10 * step,
        "time/train_s": 95,
        "time/step_s": 410 + 10 * step,
    }


def heldout(step: int, gain: float = 0.05) -> dict[str, float]:
    """Simulated figures of an evaluation after a step."""
    rate = 0.25 + 0.6 * (1 - math.exp(-gain * step))
    ends = {"value": rate, "low": rate - 0.1, "high": rate + 0.1}
    return {f"heldout/pass_at/1/{name}": value for name, value in ends.items()} | {
        "heldout/version": step
    }


async def train(server: RunningServer, run: str, gain: float, **configuration: Any) -> None:
    """A training of twelve steps with an evaluation after every fourth."""
    await put(server, run, configuration={"seed": 0, "schedule": {"steps": STEPS}, **configuration})
    for step in range(STEPS + 1):
        if step:
            notes = {"alarm entropy": HOSTILE} if step == 7 else {}
            await report(server, run, step, figures_of(step, gain), notes)
        if step % 4 == 0:
            await report(server, run, step, heldout(step, gain), {"held out": "pass@1 25 %"})


async def fill(server: RunningServer) -> None:
    """Two trainings, of which one has ended, an evaluation, and a training without steps."""
    await train(server, "first-0a", 0.05, grpo={"lr": 1e-6, "kl": 0.01})
    await server.ask("POST", "/v1/runs/first-0a/end")
    await put(server, "exam", "eval")
    await put(server, "empty")
    await train(server, "second-0b", 0.2, grpo={"lr": 3e-6, "kl": 0.01}, lora=True)
    await put(server, "second-0b", parent="first-0a", configuration={"grpo": {"lr": 3e-6}})


async def fill_sessions(tab: Tab, evidence: Evidence, run: str) -> None:
    """Sessions of a run under two versions: three of training each, and two held-out ones."""
    failure = Failure(Boundary.ENGINE, "the engine is gone", Cause.ENGINE)
    for version, rewards in enumerate([(0.0, 0.0, 1.0), (1.0, 1.0, None)]):
        # Ends once the node has loaded the version, which it reports with its lease.
        announcing = asyncio.create_task(evidence.server.control.announce(version))
        await tab.until(_SERVES.format(version=version, token=TOKENS.read))
        tasks = {
            f"step{version}": (rewards, {}),
            f"exam{version}": ((1.0, 1.0), {"held_out": "true"}),
        }
        for task, (values, tags) in tasks.items():
            for work, value in zip(
                await evidence.lease(task, len(values), run, **tags), values, strict=True
            ):
                lost = value is None
                await evidence.commit(
                    work,
                    make_result(work, 0),
                    reward=None if lost else Reward(value),
                    failure=failure if lost else None,
                    status=Status.FAILED if lost else Status.COMPLETED,
                    ledger=Ledger(
                        57_333,
                        trained=0 if lost else 57_000,
                        dropped={Reason.ABORTED: 57_333 if lost else 333},
                    ),
                )
        await announcing


async def point(tab: Tab, kind: str, title: str, share: float) -> None:
    """Send a mouse event to a chart, at a share of its axis."""
    await tab.js(
        f"""(() => {{
          const svg = {_FIGURE.format(title=title)}.querySelector("svg");
          const box = svg.getBoundingClientRect();
          const at = {{clientX: box.x + 66 + (box.width - 80) * {share}, clientY: box.y + 50}};
          svg.dispatchEvent(new MouseEvent("{kind}", {{bubbles: true, ...at}}));
        }})()"""
    )


async def hover(tab: Tab, title: str, share: float) -> str:
    """Point into a chart; its caption."""
    await point(tab, "mousemove", title, share)
    return str(await tab.js(f"{_FIGURE.format(title=title)}.querySelector('.caption').innerText"))


async def drag(tab: Tab, title: str, begin: float, end: float) -> None:
    """Drag in a chart between two shares of its axis."""
    await point(tab, "mousedown", title, begin)
    await point(tab, "mousemove", title, end)
    await point(tab, "mouseup", title, end)


# --------------------------------------------------------------------------- runs
async def test_runs_are_listed_and_compared(tab: Tab, server: RunningServer) -> None:
    """The list has states, curves and held-out change; chosen runs show what differs."""
    await fill(server)
    await open_page(tab, server, "/runs", f"{CELLS}.length === 4 && {TEXT}.includes('→')")
    cells = await tab.js(CELLS)
    rows = {row[1]: row[2:] for row in cells}
    assert list(rows) == ["second-0b", "empty", "exam", "first-0a"]
    assert rows["second-0b"][:2] == ["train", "running"]
    assert rows["second-0b"][3] == "12"
    assert (rows["second-0b"][5], rows["second-0b"][7]) == ("25 % → 80 %", "first-0a")
    assert rows["first-0a"][1] == "ended"
    assert rows["first-0a"][5] == "25 % → 52 %"
    assert rows["exam"][0] == "eval"
    assert (rows["exam"][3], rows["exam"][5]) == ("–", "–")  # noqa: RUF001 - no value
    assert await tab.js("document.querySelectorAll('.list path').length") == 2
    for name in ("first-0a", "second-0b"):
        await tab.js(f"document.querySelector('[aria-label=\"Compare {name}\"]').click()")
    await tab.until("location.search === '?compare=first-0a%2Csecond-0b'")
    await tab.until(f"{TEXT}.includes('differences')")
    assert await tab.js(TITLES) == ["Reward, mean of a step", "Held-out pass@1, 95 % interval"]
    assert await tab.js("document.querySelectorAll('figure path.line').length") == 4
    table = "document.querySelector('[aria-label=Differences]').innerText"
    differing = [line.split("\t") for line in (await tab.js(table)).splitlines()]
    assert differing[0] == ["key", "first-0a", "second-0b"]
    assert ["grpo.lr", "0.000001", "0.000003"] in differing
    assert ["grpo.kl", "0.01", "not set"] in differing
    assert "52" in await hover(tab, "Held-out", 1.0)
    await tab.js("document.querySelector('.list a[href=\"/training?run=first-0a\"]').click()")
    await tab.until("location.pathname === '/training' && location.search === '?run=first-0a'")


async def test_a_training_that_reports_nothing_is_interrupted(
    tab: Tab, server: RunningServer
) -> None:
    """It has not ended, and its last report is older than ten minutes and than three steps."""
    for run, age, step_s in (("quiet", 700, 10.0), ("slow", 700, 400.0), ("live", 5, 10.0)):
        await report(server, run, 1, {"rollout/reward": 0.5, "time/step_s": step_s})
        await server.control.database.write(
            lambda tx, run=run, age=age: tx.run(
                "UPDATE runs SET updated = updated - :age WHERE name = :run", run=run, age=age
            )
        )
    await open_page(tab, server, "/runs", f"{CELLS}.length === 3")
    await tab.until("document.querySelector('.interrupted')")
    states = {row[1]: row[3] for row in await tab.js(CELLS)}
    assert states == {"quiet": "interrupted", "slow": "running", "live": "running"}


# --------------------------------------------------------------------------- training
async def test_training_shows_the_figures_of_a_run(tab: Tab, server: RunningServer) -> None:
    """The newest training is shown, live; all charts have one range, marks and axes."""
    await fill(server)
    await open_page(tab, server, "/training", "document.querySelectorAll('figure').length === 13")
    assert await tab.js("document.querySelector('select').value") == "second-0b"
    assert await tab.js("document.querySelector('input[type=file]')") is None
    titles = await tab.js(TITLES)
    assert titles[:3] == [
        "Held-out pass@1, 95 % interval",
        "Reward, mean over sessions",
        "Entropy, nats",
    ]
    assert (await hover(tab, "Length", 0.5)).endswith("980")
    assert "step 6" in await hover(tab, "Tokens", 0.5)
    assert "trained 54,800" in await hover(tab, "Tokens", 0.5)
    assert "waiting for sessions 360" in await hover(tab, "Time per step", 0.5)
    assert {ticks for ticks in await tab.js(TICKS) if ticks} == {"0 2 4 6 8 10 12"}
    first = "document.querySelector('figure')"
    assert await tab.js(f"{first}.querySelectorAll('text.alarm').length") == 1
    assert await tab.js(f"{first}.querySelectorAll('text.evaluation').length") == 4
    assert "alarm entropy" in await tab.js(TEXT)
    await report(server, "second-0b", 13, figures_of(13), {"resumed": "after step 12"})
    await tab.until(f"{first}.querySelectorAll('text.resumed').length === 1")
    await tab.until(f"{TEXT}.includes('step 13')")


async def test_one_zoom_and_axis_for_all_charts(tab: Tab, server: RunningServer) -> None:
    """A drag in one chart narrows all; the axis is steps, versions or hours of the steps."""
    await fill(server)
    await open_page(tab, server, "/training", "document.querySelectorAll('figure').length === 13")
    await drag(tab, "Reward", 0.25, 0.5)
    await tab.until("location.search === '?from=3&to=6'")
    assert set(await tab.js(TICKS)) == {"3 4 5 6"}
    assert "steps 3 to 6" in await tab.js(TEXT)
    await tab.js(
        "[...document.querySelectorAll('button')].find(b => b.innerText === 'Whole run').click()"
    )
    await tab.until("location.search === ''")
    await tab.js(
        "[...document.querySelectorAll('button.chip')].find(b => b.innerText === 'hours').click()"
    )
    await tab.until("location.search === '?axis=hour'")
    hours = sum(410 + 10 * step for step in range(1, STEPS + 1)) / 3600
    assert f"hour {hours:.3g}" in await hover(tab, "Reward", 1.0)
    await tab.visit(f"{server.url}/training?run=empty")
    await tab.until(f"{TEXT}.includes('has not reported a step yet')")


async def test_held_out_sessions_are_not_mixed_with_training(tab: Tab, evidence: Evidence) -> None:
    """Charts by version have training sessions only, and say so; zooming selects versions."""
    server = evidence.server
    await put(server, "mine")
    await fill_sessions(tab, evidence, "mine")
    for step in (1, 2):
        await report(server, "mine", step, figures_of(step))
    await evidence.lease("other", 1)
    await open_page(tab, server, "/training", f"{TEXT}.includes('6 results')")
    assert "4 results of held-out tasks left out" in await tab.js(TEXT)
    assert "33 % (6 % to 79 %)" in await hover(tab, "Pass@1", 0.0)
    assert "100 % (34 % to 100 %)" in await hover(tab, "Pass@1", 1.0)
    assert "trainable 57,000" in await hover(tab, "Sampled tokens", 0.0)
    assert "trainable 38,000" in await hover(tab, "Sampled tokens", 1.0)
    rows = "[...document.querySelectorAll('[aria-label=Groups] td.mono')].map(td => td.innerText)"
    assert await tab.js(rows) == ["step1", "step0"]
    await tab.visit(f"{server.url}/training?from=2&to=2")
    await tab.until(f"{rows}.join() === 'step1'")
    await tab.visit(f"{server.url}/training?groups=mixed")
    await tab.until(f"{rows}.join() === 'step0'")
    await put(server, "later")
    await tab.until("document.querySelector('select').value === 'later'")
    await tab.until(f"{TEXT}.includes('No session of this run has ended')")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 800])
async def test_both_pages_are_accessible(
    tab: Tab, evidence: Evidence, theme: str, width: int
) -> None:
    """Each page follows every rule of axe and fits, in either theme."""
    await fill(evidence.server)
    await fill_sessions(tab, evidence, "second-0b")
    await set_size(tab, width)
    await tab.js(f"localStorage.setItem('theme', '{theme}')")
    for path, ready in {
        "/runs?compare=first-0a,second-0b": "document.querySelectorAll('figure').length === 2",
        "/training": "document.querySelectorAll('figure').length === 18",
        "/training?axis=hour&from=0.2&to=0.9": "document.querySelectorAll('figure').length === 18",
    }.items():
        await open_page(tab, evidence.server, path, ready)
        await check_accessibility(tab, path)
