"""The console's pictures of where time goes, of the load, and of cost, in a real Chromium."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from browser.busy import make_result
from browser.chromium import Tab
from browser.conftest import Evidence, check_accessibility, open_page, set_size
from browser.test_runs import figures_of, put, report
from support.deployment import deploy, script_task
from support.engine import reply_with
from support.server import RunningServer
from tugline.protocol import EngineSample, NodeSample
from tugline.server.store import nodes, telemetry
from tugline.server.store.base import Tx

pytestmark = pytest.mark.browser
TEXT = "document.querySelector('main').innerText"
TITLES = "[...document.querySelectorAll('figure strong')].map(each => each.innerText)"
_CLICK = "[...document.querySelectorAll('.chip')].find(each => each.innerText === {!r}).click()"
_NONE = "\u2013"
_CELLS = "[...document.querySelectorAll('.list tbody tr')].map(row => row.cells[{}].innerText)"
SLOW_EVALUATOR = {"init": 20.0, "ready": 5.0, "run": 60.0, "build": 0.2, "eval": 235.0}
SLOW_ENGINE = {"init": 20.0, "ready": 5.0, "run": 600.0, "build": 0.2, "eval": 35.0}


async def spend(
    evidence: Evidence, run: str, task: str, seconds: dict[str, float], engine_s: float | None
) -> None:
    """Two sessions of a run with these times."""
    for work in await evidence.lease(task, 2, run):
        times: dict[str, Any] = {"seconds": seconds, "engine_s": engine_s}
        await evidence.commit(work, make_result(work, 0), **times)


async def set_version(server: RunningServer, version: int) -> None:
    """Lease the following sessions under this version of the weights."""

    def change(tx: Tx) -> None:
        tx.run("UPDATE control SET version = :version", version=version)

    await server.control.database.write(change)


def store_load(tx: Tx) -> None:
    """Half an hour of load of two nodes and two engines, which ends in two minutes."""
    now = tx.now
    for node in range(2):
        for number in range(180):
            tx.now = now + 120 - 10 * (180 - number)
            wave = 0.5 + 0.4 * math.sin(number / 15 + node)
            engines = tuple(
                EngineSample(
                    engine=f"http://engine-{n}:8000",
                    running=20 * wave + n,
                    waiting=max(0.0, 30 * wave - 15),
                    kv=wave,
                    prompt_tps=9000 * wave,
                    sampled_tps=1200 * wave,
                )
                for n in range(2)
            )
            sample = NodeSample(
                cpu=wave, memory=0.4, sessions=12 * wave, agents=9 * wave, engines=engines
            )
            telemetry.add(tx, f"node-{node}", sample)
    tx.now = now


async def fill_training(evidence: Evidence) -> None:
    """A training whose evaluator is slow, and the load of its nodes and engines."""
    server = evidence.server
    await put(server, "slow")
    for step in range(1, 4):
        cost = {"cost/step": 2.0, "cost/total": 2.0 * step, "cost/solved": 0.5}
        await report(server, "slow", step, figures_of(step) | cost)
        await set_version(server, step - 1)
        await spend(evidence, "slow", f"t{step}", SLOW_EVALUATOR, 45.0)
    await server.control.database.write(store_load)


async def test_a_training_shows_its_bottleneck(
    tab: Tab, server: RunningServer, evidence: Evidence
) -> None:
    """One sentence names it, a bar has the parts, a chart the versions; a zoom selects them."""
    await fill_training(evidence)
    found = await open_page(tab, server, "/training", f"{TEXT}.includes('Where time goes')")
    assert "Evaluation takes 73 % of a session's time (235 s of 32" in found
    assert "6 sessions with a result of a node" in found
    for part in ("sandbox start 20 s, 6 %", "engine 45 s, 14 %", "agent and tools 15 s, 5 %"):
        assert part in found
    assert "Time of a session, mean seconds" in await tab.js(TITLES)
    await tab.js(_CLICK.format("share"))
    await tab.until(f"{TITLES}.includes('Time of a session, share')")
    await tab.until(f"{TITLES}.includes('KV cache, in use, by engine')")
    found = await open_page(
        tab, server, "/training?axis=version&from=1&to=2", f"{TEXT}.includes('4 sessions with')"
    )
    assert "Evaluation takes" in found


async def test_unknown_times_are_not_drawn_as_zero(
    tab: Tab, server: RunningServer, evidence: Evidence
) -> None:
    """Sessions of nodes that report no time at the engine have a part of their own."""
    await put(server, "exam", "eval")
    await spend(evidence, "exam", "t", SLOW_ENGINE, None)
    found = await open_page(
        tab, server, "/runs?compare=exam", f"{TEXT}.includes('Where time goes')"
    )
    assert "engine or agent, unknown 600 s" in found
    assert "The agent's stage, whose time at the engine is unknown, takes 91 %" in found
    assert "agent and tools" not in found


async def test_chosen_runs_show_where_their_time_went(
    tab: Tab, server: RunningServer, evidence: Evidence
) -> None:
    """From the list of runs it is one click: the box of an evaluation."""
    await put(server, "exam", "eval")
    await spend(evidence, "exam", "t", SLOW_ENGINE, 570.0)
    await put(server, "other", "run")
    await open_page(tab, server, "/runs", f"{TEXT}.includes('exam')")
    await tab.js("document.querySelector('[aria-label=\"Compare exam\"]').click()")
    await tab.until(f"{TEXT}.includes('Where time goes')")
    assert "exam: The engine takes 86 % of a session's time (570 s of 66" in await tab.js(TEXT)


async def test_nodes_show_their_load_over_time(tab: Tab, server: RunningServer) -> None:
    """Charts of the last hours, of all nodes or of one; without samples, the page says so."""
    await open_page(tab, server, "/nodes", f"{TEXT}.includes('No load was reported')")
    await server.control.database.write(store_load)
    await open_page(tab, server, "/nodes", f"{TITLES}.length === 7")
    titles = await tab.js(TITLES)
    assert titles[0] == "Engine tokens, per second, all engines"
    assert "Processors, in use, by node" in titles
    figures = "document.querySelectorAll('figure')"
    assert "engine-1:8000" in await tab.js(f"{figures}[1].innerText")
    assert "node-1" in await tab.js(f"{figures}[5].innerText")
    await tab.js(_CLICK.format("6 h"))
    await tab.until(f"{TEXT}.includes('Means over 90 s')")
    assert await tab.js("location.search") == "?hours=6"
    now = int(server.control.database.clock())
    part = f"/nodes?from={now - 600}&to={now}"
    await open_page(tab, server, part, f"{TEXT}.includes('Means over 10 s')")
    assert "hours" in await tab.js(f"{figures}[0].querySelector('svg').ariaLabel")
    other = await server.join("node-0")
    await open_page(tab, server, f"/nodes/{other.node}", f"{TITLES}.length === 7")
    assert "node-1" not in await tab.js(TEXT)
    assert await server.control.database.read(nodes.live_slots) == (1, 8)


async def test_a_real_node_shows_its_bottleneck(
    tab: Tab, server: RunningServer, tmp_path: Path
) -> None:
    """A slow engine is named, and on the same page slow evaluations once they take longer."""
    slow = {"test_it.py": "import time\ndef test_it():\n    time.sleep(9)\n"}
    play = reply_with("Hello.", first_s=4.0)
    async with deploy(tmp_path / "node", play, control=server.control) as deployment:
        await deployment.run(script_task("engine"))
        await open_page(tab, server, "/training", f"{TEXT}.includes('The engine takes')")
        await deployment.run(replace(script_task("evaluator", samples=2), files=slow))
        await tab.until(f"{TEXT}.includes('Evaluation takes')")
    assert "3 sessions with a result of a node" in await tab.js(TEXT)


async def test_the_cost_of_a_solved_task_is_on_two_pages(tab: Tab, server: RunningServer) -> None:
    """A panel of the training has it over steps, the list of runs the last one, for each kind."""
    await put(server, "paid")
    for step in range(1, 4):
        cost = {"cost/step": 2.0 + step, "cost/total": 12.5 * step, "cost/solved": 1.25 / step}
        await report(server, "paid", step, figures_of(step) | (cost if step > 1 else {}))
    await put(server, "exam", "eval")
    await report(server, "exam", 0, {"cost/total": 3.0})
    await put(server, "free", "run")
    await open_page(tab, server, "/runs", f"{TEXT}.includes('37.5')")
    costs = await tab.js(_CELLS.format(8))
    assert costs == [_NONE, "3, none solved", "37.5, 0.417 per solved task"]
    assert await tab.js(_CELLS.format(5)) == [_NONE, _NONE, "3"], "the step of a training only"
    await open_page(tab, server, "/training", f"{TITLES}.includes('Total cost, so far')")
    assert "Cost, in the currency of the prices" in await tab.js(TITLES)


@pytest.mark.parametrize("width", [1440, 800])
async def test_the_pictures_are_accessible(
    width: int, tab: Tab, server: RunningServer, evidence: Evidence
) -> None:
    """Axe finds nothing in either theme, and nothing is wider than the window."""
    await fill_training(evidence)
    await put(server, "exam", "eval")
    await spend(evidence, "exam", "t", SLOW_ENGINE, None)
    await set_size(tab, width)
    pages = {
        "/training": f"{TITLES}.includes('KV cache, in use, by engine')",
        "/runs?compare=exam,slow": f"{TEXT}.includes('Where time goes')",
        "/nodes": f"{TITLES}.length === 7",
    }
    for theme in ("light", "dark"):
        await tab.js(f"localStorage.setItem('theme', '{theme}')")
        for path, ready in pages.items():
            await open_page(tab, server, path, ready)
            await asyncio.sleep(0.2)  # transitions of colours
            await check_accessibility(tab, path)
