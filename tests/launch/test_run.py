"""``tugline.run``: tasks in this process, without a server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

import tugline
from launch.engine import create_engine
from launch.processes import task
from tiny import rendering
from tugline.client.streams import Result
from tugline.protocol import ResultView
from tugline.recording.trajectories import read_folder
from tugline.types import Boundary, Failure, Status, Task
from tugline.web.serve import serve

TOKENIZER = rendering().tokenizer
PAGE = Path(__file__).parents[2] / "docs/client.md"


def make(name: str, **fields: Any) -> Task:
    """One with an agent that needs no tools."""
    return msgspec.convert(task(name, **fields), Task)


TASK = make("a")


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """Settings for an engine that takes ids; logging is as in a program that never set it up."""
    structlog.reset_defaults()
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json(), encoding="utf-8")
    path = tmp_path / "settings.yaml"
    path.write_text("engine: {tokenizer: tokenizer.json, renderer: qwen3}\n")
    yield path
    structlog.reset_defaults()


async def test_the_example_of_the_docs_runs(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From any thread, with results by sample and the run in its folder, where it resumes."""
    (block,) = re.findall(r"```python\n(import tugline\n.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(config.parent)
    async with serve(create_engine()) as url:
        ours = f'"{url}", config="{config.name}"'
        code = compile(block.replace('"http://localhost:8000"', ours), str(PAGE), "exec")
        for _ in range(2):
            await asyncio.to_thread(exec, code, {"task": TASK})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("Ledger")[0] for line in lines] == ["a-0 1.0 ", "a-1 1.0 "] * 2
    assert [one.session for one in read_folder(config.parent / "runs/fix-add/trajectories")]


async def test_several_tasks_in_their_order(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their trajectories, in a loop that runs already, and nothing left behind."""
    monkeypatch.chdir(config.parent)
    monkeypatch.setattr("tempfile.tempdir", str(config.parent))
    tasks = [make(name, samples=1) for name in ("b", "a")]
    async with serve(create_engine()) as url:
        results = await tugline.run_async(tasks, engine=url, slots=1, config=config)
    assert [result.view.session for result in results] == ["b-0", "a-0"]
    for result in results:
        (trace,) = result.trajectory.traces
        assert TOKENIZER.decode(trace.ids[trace.mask].tolist()) == "so be it<|im_end|>"
    assert not list(config.parent.glob("tugline-*"))


async def test_a_wrong_option_is_named() -> None:
    """As the configuration names it."""
    with pytest.raises(tugline.UsageError, match=r"node\.slots is 0, must be"):
        await tugline.run_async(TASK, engine="http://localhost:1", slots=0)
    with pytest.raises(tugline.UsageError, match="no engine"):
        await tugline.run_async(TASK)


def test_a_notebook_shows_a_result_without_markup_of_an_agent() -> None:
    """What a program said is text."""
    view = ResultView(
        position=1, session="a-0", task="a", tenant="t", sample=0, attempt=0, status=Status.FAILED,
        reward=None, failure=Failure(Boundary.HARNESS, "<script>alert(1)</script>"), sampled=5,
        trained=0, bytes=0, seconds={}, created=0.0,
    )  # fmt: skip
    shown = Result(view, b"")._repr_html_()
    assert "a-0<td>failed<td>reward None<td>0 of 5 sampled tokens are trained" in shown
    assert "<script" not in shown
