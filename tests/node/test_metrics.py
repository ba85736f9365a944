"""The metrics page of a node with real sessions."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from support.deployment import CALL, deploy, read_samples, script_task
from support.polling import until
from tugline.node.admission import EngineLoad
from tugline.node.telemetry import Stats
from tugline.types import Status
from tugline.web.serve import serve


async def read_page(folder: Path) -> tuple[bytes, Stats]:
    """The page and counters after three sessions, one of which failed twice."""
    async with deploy(folder) as deployment:
        await deployment.run(script_task("good", samples=2), script_task("bad", "exit(3)"))
        return await deployment.pages.page(), deployment.node.stats


async def test_the_page_counts_sessions(tmp_path: Path) -> None:
    """The page of a server and a node in one process has each metric once, with their results."""
    page, _ = await read_page(tmp_path)
    names = [line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    samples = read_samples(page)
    assert samples["tugline_sessions"]["completed",] == 2
    assert samples["tugline_node_results_total"] == {("completed",): 2, ("failed",): 2}
    assert samples["tugline_node_failures_total"] == {("harness",): 2}, "it was tried twice"
    assert samples["tugline_node_leases_total"]["leased",] == 4


async def test_the_page_counts_stages(tmp_path: Path) -> None:
    """A failed session reaches every stage but EVAL; none is in a stage at the end."""
    samples = read_samples((await read_page(tmp_path))[0])
    for stage in ("init", "ready", "run", "build"):
        assert samples["tugline_node_stage_seconds_count"][stage,] == 4
    assert samples["tugline_node_stage_seconds_count"]["eval",] == 2
    assert samples["tugline_node_stage_slots"]["run",] == 2
    assert set(samples["tugline_node_stage_sessions"].values()) == {0}


async def test_the_page_counts_tokens_and_calls(tmp_path: Path) -> None:
    """The counts of the ledger, the gateway and the node agree."""
    page, stats = await read_page(tmp_path)
    samples = read_samples(page)
    tokens = samples["tugline_node_ledger_tokens_total"]
    assert sum(tokens.values()) > 0
    assert tokens["trained", ""] == stats.trained
    assert samples["tugline_gateway_calls_total"] == {("complete",): 2}
    assert samples["tugline_gateway_tokens_total"]["sampled",] == sum(tokens.values())
    assert samples["tugline_gateway_answer_seconds_count"][()] == 2


async def test_the_page_shows_the_stages_of_sessions(tmp_path: Path) -> None:
    """The page counts two agents that run and one that is ready."""
    script = f"{CALL}\nimport time; time.sleep(3)"
    async with deploy(tmp_path) as deployment:
        await deployment.control.submit([script_task("slow", script, samples=3)])
        stages = deployment.node.pools.by_stage
        await until(lambda: stages[Status.RUN].waiting == 1, 20)
        samples = read_samples(await deployment.metrics.render())
    sessions = samples["tugline_node_stage_sessions"]
    assert (sessions["run",], sessions["ready",]) == (2, 1)
    assert samples["tugline_node_stage_waiting"]["run",] == 1
    assert samples["tugline_node_sessions"][()] == 3


async def test_engines_are_polled(tmp_path: Path) -> None:
    """An engine without a metrics page is down, and left out of admission."""
    async with deploy(tmp_path) as deployment:
        (url,) = deployment.engines.loads
        gone, other = "http://127.0.0.1:9", f"{url}/elsewhere"
        deployment.engines.loads |= {one: EngineLoad(up=True, running=3) for one in (gone, other)}
        (load,) = await deployment.engines.poll()
        assert load is deployment.engines.loads[url]
        assert load.waiting == 0
        samples = read_samples(await deployment.metrics.render())
    assert samples["tugline_engine_up"] == {(url,): 1, (gone,): 0, (other,): 0}
    assert samples["tugline_engine_running"][gone,] == 0


async def test_a_node_serves_its_page(tmp_path: Path) -> None:
    """The page is served over HTTP in Prometheus' content type, beside a health check."""
    async with (
        deploy(tmp_path) as deployment,
        serve(deployment.metrics.make_app()) as url,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{url}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=")
            assert "tugline_node_sessions" in read_samples(await answer.read())
        async with http.get(f"{url}/healthz") as answer:
            assert answer.status == 200
