"""`tugline train` with real engines: every version is used, in each pause mode."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engines import servers
from engines.tool_model import Folders
from support.training import write_config
from tugline.trainers.batches import TaskBatches
from tugline.trainers.config import read_config
from tugline.trainers.loop import train
from tugline.trainers.progress import RunProgress
from tugline.trainers.sinks import METRICS, make_sinks, read_lines

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


Runs = list[tuple[str, dict[str, Any]]]
MERGED: Runs = [
    ("keep", {"lora": {"rank": 4}, "grpo": {"lr": 1e-2}}),
    ("wait", {}),
    ("abort", {}),
    ("keep", {}),
]
ADAPTER: Runs = [
    (pause, {"lora": {"rank": 4, "publish": "adapter"}, "grpo": {"lr": 1e-2}})
    for pause in ("wait", "abort")
]


@pytest.mark.parametrize(
    ("name", "flags", "runs"),
    [
        ("vllm", (), MERGED),
        pytest.param("sglang", (), MERGED, marks=pytest.mark.nightly),
        pytest.param(
            "vllm", ("--enable-lora", "--max-lora-rank", "8"), ADAPTER, marks=pytest.mark.nightly
        ),
    ],
    ids=["vllm", "sglang", "vllm-adapter"],
)
async def test_weights_arrive_in_every_pause_mode(
    tmp_path: Path, folders: Folders, name: str, flags: tuple[str, ...], runs: Runs
) -> None:
    """Trainer and engine agree within 1e-4 after each publication; sessions continue."""
    folder = folders.first
    with servers.running(name, folder, tmp_path, *flags) as server:
        for pause, changes in runs:
            home = tmp_path / f"{pause}{len(changes)}"
            home.mkdir()
            schedule = {"staleness": 1, "pause": pause, "samples": 4}
            config = write_config(home, schedule=schedule, **changes)
            values = json.loads(config.read_text())
            values |= {"model": str(folder), "engine": {"urls": [server.url], "renderer": "qwen3"}}
            config.write_text(json.dumps(values))
            settings = read_config(config, folder)
            sinks = make_sinks((), Console(quiet=True))
            batches = TaskBatches(settings, home)
            state = (await train(settings, batches, home / "run", sinks, RunProgress(print))).state
            assert (state.step, state.sessions) == (3, 24)
            rows = read_lines(home / "run" / METRICS)
            published = [row for row in rows if "publish/version" in row]
            assert len(published) == 3
            assert all(row["publish/max_abs_dlogprob"] < 1e-4 for row in published)
            assert any(row.get("publish/arrived", 0) > 0.99 for row in published)
            sampled = [row["rollout/staleness_max"] for row in rows if "rollout/reward" in row]
            assert max(sampled) <= 1
