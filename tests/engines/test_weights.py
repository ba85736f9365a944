"""Trained weights of models in the hub's format are published to real engines, and proven there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engines import hub_models, servers
from engines.conftest import FURTHEST
from support.models import log_probabilities
from support.server import make_control
from trainers.sessions import VERSION, groups
from tugline.errors import EngineError
from tugline.gateway.probe import probe
from tugline.gateway.probe_client import CheckOutcome
from tugline.gateway.probe_reports import ModelFacts
from tugline.launch.settings import EngineSettings
from tugline.recording.verify.engine import connect_scorer
from tugline.trainers.config import Schedule, TaskSource, TrainConfig
from tugline.trainers.engines import ServedWeights, make_publisher, open_replicas
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.models import Models, model_folder, open_models, write_weights
from tugline.trainers.proof import Probe, measure_arrival
from tugline.trainers.publish import Publication, RemoteWeightUpdater, make_updater
from tugline.trainers.tensor_files import read_places
from tugline.types import Logprobs, PluginSpec

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
CLOSE = 1e-4
"""Largest difference of an engine in float32 from the trainer, nats."""
OWN = 3.0
"""Largest difference of another engine, as a multiple of that before the update."""
IDS = np.random.default_rng(3).integers(20, 600, 400).astype(np.int32)
"""A sequence that fills blocks of the prefix cache, without special tokens."""
BFLOAT16 = ("--dtype", "bfloat16", "--language-model-only")
"""Flags for the hybrid, which vLLM computes in no other type on CPU."""


@dataclass
class EngineCase:
    """A running engine and its model."""

    name: str
    kind: str
    url: str
    source: Path
    version: int = 0
    """Newest version that it was given; it only grows, since tests share the engine."""

    @property
    def exact(self) -> bool:
        """Whether it computes in float32."""
        return self.kind != "hybrid"

    def count_version(self) -> int:
        """Return the next version."""
        self.version += 1
        return self.version


def choose(*cases: str) -> pytest.MarkDecorator:
    """Run a test with engines and kinds; the core of the suite has only the hybrid."""
    core = "vllm-hybrid"
    params = [
        pytest.param(case, id=case, marks=() if case == core else pytest.mark.nightly)
        for case in cases
    ]
    return pytest.mark.parametrize("engine", params, indirect=True)


SERVING = ("vllm-hybrid", "vllm-dense", "sglang-dense", "sglang-moe")
"""Engines and models whose weights can be changed."""


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineCase]:
    """A running engine, which tests share."""
    torch.set_num_threads(1)
    name, _, kind = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    source = hub_models.make(kind, folder / "source")
    with servers.running(name, source, folder, *get_flags(kind)) as server:
        yield EngineCase(name, kind, server.url, source)


def get_flags(kind: str) -> tuple[str, ...]:
    """Return the flags with which engines serve a kind."""
    return BFLOAT16 if kind == "hybrid" else ()


# --------------------------------------------------------------------------- a run
@dataclass
class Run:
    """The parts of a training run that publish weights."""

    engine: EngineCase
    config: TrainConfig
    models: Models
    served: ServedWeights
    scored: Logprobs
    """Of `IDS` under the weights published last."""

    def train(self) -> None:
        """Make an update of GRPO, on sessions with random tokens."""
        model = self.models.trainer.trainer.model
        report = self.models.trainer.step(groups(model, tasks=1), version=VERSION)
        assert report.updates == 1

    async def publish(self, folder: Path | None = None) -> Publication:
        """Publish the weights, or instead those in a folder, as the next version."""
        before, after = self.scored, self.models.trainer.score(IDS)
        version = self.engine.count_version()
        if folder is None:
            publication = await self.served.publish(version, Probe(IDS, before, after))
        else:  # it makes one attempt
            publisher = self.served.publisher
            publication = await publisher.publish(folder, version, Probe(IDS, before, after))
        self.scored = after
        return publication

    async def measure(self) -> float:
        """Return the largest difference of the engine from the weights published last, nats."""
        return measure(await score(self.engine.url), self.scored)


async def score(url: str) -> Logprobs:
    """Return an engine's log probabilities of `IDS`."""
    async with connect_scorer(url) as scorer:
        return await scorer.score(IDS, 1)


def measure(first: Logprobs, second: Logprobs) -> float:
    """Return the largest difference."""
    return float(np.abs(first - second).max())


def keep_cache(updater: RemoteWeightUpdater, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an updater forget to drop the prefix cache, which vLLM also does in a pause."""
    post = updater._post

    async def forget(path: str, body: Any = None) -> dict[str, Any]:
        if path.startswith(("/pause?", "/reset_prefix_cache", "/resume")):
            return {}
        return await post(path, body | {"flush_cache": False} if body else body)

    monkeypatch.setattr(updater, "_post", forget)


@contextlib.asynccontextmanager
async def open_run(engine: EngineCase, folder: Path) -> AsyncIterator[Run]:
    """Open a run of the engine's model."""
    config = TrainConfig(
        model=engine.source,
        tasks=TaskSource(taskset=PluginSpec("jsonl")),
        template={},
        engine=EngineSettings(urls=(engine.url,), tokenizer=engine.source, renderer="qwen3"),
        device="cpu",
        publish_dtype="float32" if engine.exact else None,
        grpo=GrpoConfig(lr=5e-3, seed=1, replay_experts=False),  # random tokens have no experts
        schedule=Schedule(publish_s=60.0),
    )
    async with contextlib.AsyncExitStack() as stack:
        models = stack.enter_context(open_models(config))
        replicas = await stack.enter_async_context(open_replicas(config, models, folder))
        store = f"sqlite:{folder / 'server.db'}"
        control = await stack.enter_async_context(make_control(store, folder))
        publisher = make_publisher(config, control, replicas)
        served = ServedWeights(config, models, publisher, folder / "weights", print)
        yield Run(engine, config, models, served, models.trainer.score(IDS))


# --------------------------------------------------------------------------- tests
@choose(*SERVING)
async def test_an_update_arrives_and_is_proven(
    engine: EngineCase, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The engine's logprobs are the trainer's after an update, within the engine's precision."""
    async with open_run(engine, tmp_path) as run:
        first = await run.publish()
        own = await run.measure()
        run.train()
        second = await run.publish()
    assert (second.moved or 0) > 0.1
    assert second.arrived == pytest.approx(1, abs=0.05)
    limit = CLOSE if engine.exact else OWN * own
    for publication in (first, second):
        assert publication.max_abs_dlogprob is not None
        assert publication.max_abs_dlogprob <= limit
    record_property(FURTHEST, second.max_abs_dlogprob)


@choose("vllm-dense", "sglang-dense", "sglang-moe")
async def test_a_stale_prefix_cache_is_noticed(
    engine: EngineCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context of the old weights fails the publication, which names replica and difference."""
    error = rf"{engine.url} .* with its prefix cache its logprobs differ by [\d.e+-]+ nats"
    async with open_run(engine, tmp_path) as run, await make_updater(engine.url) as updater:
        await run.publish()
        run.train()
        keep_cache(updater, monkeypatch)
        run.served.publisher.updaters = {engine.url: updater.update}
        with pytest.raises(EngineError, match=error):
            await run.publish(write(run, tmp_path / "second"))


@choose("sglang-moe")
async def test_tensors_that_an_engine_skips_are_noticed(engine: EngineCase, tmp_path: Path) -> None:
    """SGLang reports success for fused experts and keeps its own; the weights before are restored.

    The other tensors of such a folder do arrive.
    """
    error = rf"{engine.url} .* its logprobs differ from the trainer's by [\d.e+-]+ nats"
    async with open_run(engine, tmp_path) as run:
        await run.publish()
        run.train()
        fused = write(run, tmp_path / "fused")
        model = run.models.trainer.trainer.model
        model.save_pretrained(fused, save_original_format=False)
        assert any(name.endswith("experts.down_proj") for name in read_places(fused))
        with pytest.raises(EngineError, match=error):
            await run.publish(fused)
        assert await run.measure() < CLOSE


@choose("vllm-moe")
async def test_a_reload_that_breaks_weights_is_noticed(engine: EngineCase, tmp_path: Path) -> None:
    """On CPU, vLLM 0.32 breaks the experts of a model that it loads again, even the same ones."""
    error = rf"{engine.url} .* its logprobs differ from the trainer's by [\d.e+-]+ nats"
    async with open_run(engine, tmp_path) as run:
        assert await run.measure() < CLOSE
        with pytest.raises(EngineError, match=error):
            await run.publish(write(run, tmp_path / "same"))


def write(run: Run, folder: Path) -> Path:
    """Write the weights as a training run does at its end, with the other files of the source."""
    with model_folder(run.engine.source, folder) as draft:
        write_weights(run.config, run.models, draft)
    return folder


@choose(*SERVING, "vllm-moe")
async def test_the_final_model_is_as_its_source(engine: EngineCase, tmp_path: Path) -> None:
    """It has the source's names, configuration and untrained tensors; engine and library load it.

    A fresh engine differs from transformers by no more than it did with the source.
    """
    limit = CLOSE
    async with open_run(engine, tmp_path) as run:
        before = run.scored
        if not engine.exact:
            await run.publish()
            limit = OWN * await run.measure()
        run.train()
        folder = write(run, tmp_path / "model")
        after = run.models.trainer.score(IDS)
    old, new = (load_file(each / "model.safetensors") for each in (engine.source, folder))
    assert {name: each.shape for name, each in old.items()} == {
        name: each.shape for name, each in new.items()
    }
    assert (folder / "config.json").read_bytes() == (engine.source / "config.json").read_bytes()
    untrained = [name for name in old if ".visual." in name]
    assert bool(untrained) == (engine.kind == "hybrid")
    assert all(torch.equal(old[name], new[name]) for name in untrained)
    theirs = compute(folder)
    assert measure_arrival(before, after, theirs) == pytest.approx(1, abs=0.05)
    with servers.running(engine.name, folder, tmp_path, *get_flags(engine.kind)) as server:
        assert measure(await score(server.url), theirs) <= limit


@torch.no_grad()
def compute(folder: Path) -> Logprobs:
    """Return log probabilities of `IDS` by transformers in float32; no tensor may be missing."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, found = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values())
    return log_probabilities(model, IDS).float().numpy()


@choose("sglang-moe")
async def test_doctor_names_the_missing_flag(engine: EngineCase) -> None:
    """A mixture of experts whose engine does not report experts is not fit for training."""
    report = await probe(engine.url, facts=ModelFacts.read(engine.source))
    failed = [check for check in report.checks if check.outcome is CheckOutcome.FAIL]
    assert [check.name for check in failed] == ["experts"]
    assert "--enable-return-routed-experts" in failed[0].detail
    assert any("--enable-return-routed-experts" in line for line in report.advice)
