"""`examples/swe_gym`: its files are what the programs take, and the toy runs to its end."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.processes import World, until
from swe_toy import EXAMPLE, make, written
from tasksets.test_swe import GYM
from tugline.config import load
from tugline.datasets.base import TaskTemplate
from tugline.datasets.files import read_set
from tugline.datasets.swe import SweTaskSet
from tugline.launch.settings import load_settings
from tugline.rollout.parts import Parts
from tugline.sandbox.bubblewrap.runtime import Bubblewrap
from tugline.schema import read_values
from tugline.trainers.grpo.config import GrpoConfig

SIZES = ("paper", "toy")


@pytest.mark.parametrize("size", SIZES)
def test_the_tasks_are_well_said(size: str, tmp_path: Path) -> None:
    """Every key is one, and every part can be made with its options."""
    file = EXAMPLE / f"{size}.yaml"
    assert read_set(file) is not None
    template = TaskTemplate.read(read_values(file)["template"], size, EXAMPLE)
    (task,) = SweTaskSet(path=written(tmp_path / "rows.jsonl", GYM)).tasks(template)
    Parts().check(task)


@pytest.mark.parametrize("size", SIZES)
def test_the_cluster_is_well_said(size: str) -> None:
    """Every key is a setting, with a value that may be."""
    settings = load_settings(EXAMPLE / f"{size}.cluster.yaml", server={}, node={}, engine={})
    assert settings.node.slots >= 1


def test_the_paper_is_what_the_paper_says() -> None:
    """293 tasks, 16 samples, 4 groups a batch, one epoch, Adam at 1e-6, TIS, prefix merging."""
    settings = read_values(EXAMPLE / "paper.yaml")
    assert (settings["select"]["limit"], settings["template"]["samples"]) == (293, 16)
    assert settings["template"]["builder"] == {"name": "prefix_merging"}
    grpo = load(EXAMPLE / "paper.grpo.yaml", GrpoConfig)
    assert (grpo.lr, grpo.epochs, grpo.sessions_per_update) == (1e-6, 1, 4 * 16)
    assert grpo.importance_cap is not None
    toy = load(EXAMPLE / "toy.grpo.yaml", GrpoConfig)
    assert toy.sessions_per_update == 3 * read_values(EXAMPLE / "toy.yaml")["template"]["samples"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A copy of the example, and whatever is started in it."""
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("toy", "runs"))
    made = World(tmp_path / "example")
    yield made
    made.close()


def test_the_toy_runs_to_its_end(world: World) -> None:
    """Sandbox, agent, model, patch, and SWE-bench's grading: half of the sessions earn 1."""
    if why := Bubblewrap().check_available():
        pytest.skip(why)
    make(world.folder / "toy")
    engine = str(Path(__file__).with_name("swe_engine.py"))
    world.start("engine", sys.executable, engine, "toy/rows.jsonl", "engine.url")
    url = world.folder / "engine.url"
    until(url.exists, "the engine", lambda: world.said("engine"))
    options = ("--engine", url.read_text(), "--tokenizer", "tokenizer.json", "--renderer", "qwen3")
    process = world.tugline(
        "run", "run", "toy.yaml", "--config", "toy.cluster.yaml", "--out", "runs", *options
    )
    assert process.wait(100) == 0, world.said("run")
    lines = (world.folder / "runs" / "results.jsonl").read_text().splitlines()
    earned = Counter((one["task"], one["reward"]) for one in map(json.loads, lines))
    assert earned == {(f"tugline__larder-{n}", reward): 1 for n in (1, 2, 3) for reward in (0, 1)}
