"""The documented metrics and the dashboard match the code."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from support.deployment import deploy

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "examples" / "grafana" / "tugline.json"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Metric]]:
    """Every metric, of the server and of a node."""

    async def look() -> dict[str, list[Metric]]:
        async with deploy(tmp_path_factory.mktemp("observed")) as deployment:
            return {
                "the server": await deployment.pages.families(),
                "a node": deployment.metrics.collect(),
            }

    return asyncio.run(look())


def full_name(metric: Metric) -> str:
    """The name as it is scraped."""
    return metric.name + ("_total" if metric.type == "counter" else "")


def make_row(metric: Metric) -> str:
    """Its row in the table of the docs."""
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # type: ignore[attr-defined]
    return f"| `{full_name(metric)}` | {metric.type} | {labels} | {metric.documentation} |"


@pytest.mark.parametrize("whose", ["the server", "a node"])
def test_every_metric_is_documented(whose: str, families: dict[str, list[Metric]]) -> None:
    """Name, kind, labels and meaning are in docs/observability.md, row by row."""
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    table = re.search(rf"<!-- metrics of {whose} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert table
    written = [line for line in table[1].splitlines() if line.startswith("| `")]
    expected = [make_row(metric) for metric in families[whose]]
    assert written == expected, "the table should be:\n" + "\n".join(expected)


def test_the_dashboard_queries_existing_metrics(families: dict[str, list[Metric]]) -> None:
    """Each query of the dashboard has metrics and labels of ours."""
    known: dict[str, set[str]] = {}
    for metric in (*families["the server"], *families["a node"]):
        labels = {*metric._labelnames, "instance"}  # type: ignore[attr-defined]
        names = [full_name(metric)]
        if metric.type == "histogram":
            names = [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
            labels.add("le")
        known |= dict.fromkeys(names, labels)
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"tugline_\w+", query["expr"])
        assert names
        assert set(names) <= known.keys(), query
        used = re.findall(r"\{\{(\w+)\}\}", query["legendFormat"])
        used += [
            label.strip()
            for by in re.findall(r"by \((.*?)\)", query["expr"])
            for label in by.split(",")
        ]
        assert set(used) <= set.union(*(known[name] for name in names)), query
