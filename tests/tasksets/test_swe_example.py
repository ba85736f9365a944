"""`examples/swe_gym`: its files are valid, and the toy runs to its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from launch.processes import World
from support.swe_repository import EXAMPLE, make_repository, write_rows
from support.tokenizer import make_tokenizer
from tasksets.test_swe import GYM
from tugline.config import load
from tugline.datasets.base import TaskTemplate
from tugline.datasets.files import read_set
from tugline.datasets.swe import SweTaskSet
from tugline.inference.server import create_app
from tugline.launch.settings import load_settings
from tugline.rollout.parts import Parts
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.schema import read_values
from tugline.testing import Reply, ScriptedEngine
from tugline.trainers.grpo.config import GrpoConfig
from tugline.types import Ids
from tugline.web.serve import serve

SIZES = ("paper", "toy")


@pytest.mark.parametrize("size", SIZES)
def test_task_sets_are_valid(size: str, tmp_path: Path) -> None:
    """All keys are known, and each plug-in can be created with its options."""
    file = EXAMPLE / f"{size}.yaml"
    assert read_set(file) is not None
    template = TaskTemplate.read(read_values(file)["template"], size, EXAMPLE)
    (task,) = SweTaskSet(path=write_rows(tmp_path / "rows.jsonl", GYM)).tasks(template)
    Parts().check(task)


@pytest.mark.parametrize("size", SIZES)
def test_cluster_settings_are_valid(size: str) -> None:
    """All keys are known, with valid values."""
    settings = load_settings(EXAMPLE / f"{size}.cluster.yaml", server={}, node={}, engine={})
    assert settings.node.slots >= 1


def test_the_paper_configuration_matches_the_paper() -> None:
    """The configuration has the paper's 293 tasks, samples, groups, epoch, optimizer and loss."""
    settings = read_values(EXAMPLE / "paper.yaml")
    assert (settings["select"]["limit"], settings["template"]["samples"]) == (293, 16)
    assert settings["template"]["builder"] == {"name": "prefix_merging"}
    grpo = load(EXAMPLE / "paper.grpo.yaml", GrpoConfig)
    assert (grpo.lr, grpo.epochs, grpo.sessions_per_update) == (1e-6, 1, 4 * 16)
    assert grpo.importance == "truncate"
    toy = load(EXAMPLE / "toy.grpo.yaml", GrpoConfig)
    assert toy.sessions_per_update == 3 * read_values(EXAMPLE / "toy.yaml")["template"]["samples"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A copy of the example to start processes in."""
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("toy", "runs"))
    with contextlib.closing(World(tmp_path / "example")) as opened:
        yield opened


@contextlib.asynccontextmanager
async def serve_engine(rows: Sequence[dict[str, str]]) -> AsyncIterator[str]:
    """Serve an engine that solves an issue in every other session; its URL."""
    tokens = make_tokenizer()
    end = tokens.encode("<|im_end|>")
    turns = {row["instance_id"]: itertools.cycle((True, False)) for row in rows}

    def reply(prompt: Ids, _request: str) -> Reply:
        text = tokens.decode(prompt.tolist())
        row = next((row for row in rows if row["problem_statement"].strip() in text), None)
        answer = "Done."
        if row is not None and "(exit 0)" not in text:
            answer = "I look at it first.\n```sh\nls\n```"
            if next(turns[row["instance_id"]]):
                answer = f"This mends it.\n```sh\ngit apply <<'PATCH'\n{row['patch']}PATCH\n```"
        return Reply([*tokens.encode(answer), *end], tokens_per_chunk=64)

    engine = ScriptedEngine(reply, vocab_size=tokens.size, eos_ids=end)
    async with serve(create_app(engine, model_name="scripted")) as url:
        yield url


@pytest.mark.slow
async def test_the_toy_runs_to_its_end(world: World) -> None:
    """Half of the sessions earn 1 from SWE-bench's grading, with sandbox, agent and model."""
    if reason := Bubblewrap().check_available():
        pytest.skip(reason)
    async with serve_engine(make_repository(world.folder / "toy")) as url:
        options = ("--engine", url, "--tokenizer", "tokenizer.json", "--renderer", "qwen3")
        process = world.tugline(
            "run", "run", "toy.yaml", "--config", "toy.cluster.yaml", "--out", "runs", *options
        )
        assert await asyncio.to_thread(process.wait, 100) == 0, world.read_log("run")
    lines = (world.folder / "runs" / "results.jsonl").read_text().splitlines()
    earned = Counter((view["task"], view["reward"]) for view in map(json.loads, lines))
    assert earned == {(f"tugline__larder-{n}", reward): 1 for n in (1, 2, 3) for reward in (0, 1)}
