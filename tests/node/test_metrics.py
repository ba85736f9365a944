"""The metrics page of a node with real sessions."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from support.deployment import CALL, observed, read, task, until
from tugline.node.admission import EngineLoad
from tugline.types import Status
from tugline.web.serve import serve


async def test_the_page_counts_sessions(tmp_path: Path) -> None:
    """Stages, tokens, calls and failures of three sessions, one of which failed twice.

    The page of a server with a node in the same process has every metric once.
    """
    async with observed(tmp_path) as rig:
        await rig.run(task("good", samples=2), task("bad", "exit(3)"))
        page = await rig.pages.page()
        stats = rig.node.stats
    names = [line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    samples = read(page)
    assert samples["tugline_sessions"]["completed",] == 2
    assert samples["tugline_node_results_total"] == {("completed",): 2, ("failed",): 2}
    assert samples["tugline_node_failures_total"] == {("harness",): 2}, "it was tried twice"
    assert samples["tugline_node_leases_total"]["leased",] == 4
    for stage in ("init", "ready", "run", "build"):
        assert samples["tugline_node_stage_seconds_count"][stage,] == 4
    assert samples["tugline_node_stage_seconds_count"]["eval",] == 2
    assert samples["tugline_node_stage_slots"]["run",] == 2
    assert set(samples["tugline_node_stage_sessions"].values()) == {0}
    tokens = samples["tugline_node_ledger_tokens_total"]
    assert sum(tokens.values()) > 0
    assert tokens["trained", ""] == stats.trained
    assert samples["tugline_gateway_calls_total"] == {("complete",): 2}
    assert samples["tugline_gateway_tokens_total"]["sampled",] == sum(tokens.values())
    assert samples["tugline_gateway_answer_seconds_count"][()] == 2


async def test_the_page_shows_the_stages_of_sessions(tmp_path: Path) -> None:
    """While two agents run and one more is ready."""
    script = f"{CALL}\nimport time; time.sleep(3)"
    async with observed(tmp_path) as rig:
        await rig.control.submit([task("slow", script, samples=3)])
        stages = rig.node.pools.by_stage
        await until(lambda: stages[Status.RUN].waiting == 1, 20)
        samples = read(await rig.metrics.render())
    sessions = samples["tugline_node_stage_sessions"]
    assert (sessions["run",], sessions["ready",]) == (2, 1)
    assert samples["tugline_node_stage_waiting"]["run",] == 1
    assert samples["tugline_node_sessions"][()] == 3


async def test_engines_are_polled(tmp_path: Path) -> None:
    """One without a metrics page is down, and left out of admission."""
    async with observed(tmp_path) as rig:
        (url,) = rig.engines.loads
        gone, other = "http://127.0.0.1:9", f"{url}/elsewhere"
        rig.engines.loads |= {one: EngineLoad(up=True, running=3) for one in (gone, other)}
        (load,) = await rig.engines.poll()
        assert load is rig.engines.loads[url]
        assert load.waiting == 0
        samples = read(await rig.metrics.render())
    assert samples["tugline_engine_up"] == {(url,): 1, (gone,): 0, (other,): 0}
    assert samples["tugline_engine_running"][gone,] == 0


async def test_a_node_serves_its_page(tmp_path: Path) -> None:
    """Over HTTP, in Prometheus' content type; with a health check."""
    async with (
        observed(tmp_path) as rig,
        serve(rig.metrics.make_app()) as url,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{url}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=")
            assert "tugline_node_sessions" in read(await answer.read())
        async with http.get(f"{url}/healthz") as answer:
            assert answer.status == 200
