"""Components of a run: the models on the ranks of torchrun, the engine, and the server.

Rank 0 runs the training loop. The other ranks only train: they repeat each call that rank 0 makes
on its `TrainerGroup`. The engine is in the process of rank 0 with a copy of the model, or a running
vLLM or SGLang. It receives full weights, with any adapter merged, or the adapter alone. A server in
this process has one node; a remote server has any number of nodes and outlives the trainer.
"""

import asyncio
import contextlib
import copy
import shutil
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from transformers import PreTrainedModel

from tugline.chat.tokenizer import Tokenizer
from tugline.client.api import Client
from tugline.errors import Missing, UsageError
from tugline.inference.engine import Engine
from tugline.inference.load import load
from tugline.launch.engine import (
    EngineConnection,
    make_rendering,
    open_engine,
    read_api_key,
    serve_engine,
)
from tugline.launch.local import LocalServer, OnDone, open_local
from tugline.launch.settings import Settings
from tugline.protocol import PauseMode
from tugline.recording.verify.engine import connect_scorer
from tugline.server.settings import ServerSettings
from tugline.trainers.config import Lora, TrainConfig
from tugline.trainers.grpo import checkpoint
from tugline.trainers.grpo.distributed import gather_tensors, join_ranks, rank_and_world, shard
from tugline.trainers.grpo.train import Grpo, StepReport
from tugline.trainers.publish import ADAPTER, Publisher, Update, VllmWeightUpdater, make_updater
from tugline.types import Ids, Logprobs, Task, Trajectory

_BETWEEN_CALLS = timedelta(days=365)
"""Timeout of other ranks' waits: sampling may take any time; torchrun ends them if rank 0 dies."""
_LEASE_S = 120.0
"""Lease time, longer than a server's default, because training delays renewals in this process."""
_SERVER_S = 600.0
"""Seconds for which a remote server may be unavailable."""


class TrainerGroup:
    """The trainer on all ranks: rank 0 announces each method call, and all ranks run it."""

    def __init__(self, trainer: Grpo) -> None:
        self._trainer = trainer
        self._busy = threading.Lock()
        self._rank, world = rank_and_world()
        self._calls = None if world == 1 else dist.new_group(backend="gloo", timeout=_BETWEEN_CALLS)

    def step(self, trajectories: Sequence[Trajectory], version: int) -> StepReport:
        """Run `Grpo.step` with the trajectories of rank 0."""
        with self._on_all_ranks("step", (), version):
            return self._trainer.step(trajectories, version=version)

    def score(self, ids: Ids) -> Logprobs:
        """See `Grpo.score`."""
        with self._on_all_ranks("score", ids):
            return self._trainer.score(ids)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the full weights to serve, by their names in the model without an adapter."""
        with self._on_all_ranks("weights"):
            return merge_adapter(self._trainer.model)

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT does."""
        with self._on_all_ranks("write_adapter", folder):
            model = self._trainer.model
            weights = dict(gather_tensors(checkpoint.unique_weights(model)))
            if self._rank == 0:
                checkpoint.write_model(folder, model, weights)

    def save(self, folder: Path, step: int, version: int, extra: dict[str, Any], keep: int) -> None:
        """See `checkpoint.save`."""
        with self._on_all_ranks("save", folder, step, version, extra, keep):
            checkpoint.save(
                folder, self._trainer, step=step, version=version, extra=extra, keep=keep
            )  # fmt: skip

    def load(self, path: Path) -> checkpoint.CheckpointState:
        """See `checkpoint.load`; all ranks must be able to read `path`."""
        with self._on_all_ranks("load", path):
            return checkpoint.load(path, self._trainer)

    @contextlib.contextmanager
    def _on_all_ranks(self, *call: object) -> Iterator[None]:
        """Announce a call; other calls, and `close`, wait until it has finished."""
        with self._busy:
            if self._calls is not None and self._rank == 0:
                dist.broadcast_object_list([call], src=0, group=self._calls)
            yield

    def follow(self) -> None:
        """Run the calls that rank 0 announces until it closes the group; for the other ranks."""
        while True:
            announced: list[Any] = [None]
            dist.broadcast_object_list(announced, src=0, group=self._calls)
            if not announced[0]:
                return
            name, *arguments = announced[0]
            getattr(self, name)(*arguments)

    def close(self) -> None:
        """End the other ranks that are still running."""
        with contextlib.suppress(RuntimeError), self._on_all_ranks():
            pass


@torch.no_grad()
def merge_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Return the full weights with an adapter merged; `model` is not changed."""
    if not hasattr(model, "peft_config"):
        return dict(gather_tensors(model.state_dict()))
    base = model.get_base_model()
    adapted = {name: part for name, part in base.named_modules() if hasattr(part, "base_layer")}
    merged = {}
    for name, tensor in base.state_dict().items():
        layer, inner, weight = name.partition(".base_layer.")
        if inner and weight == "weight":
            merged[f"{layer}.weight"] = tensor + adapted[layer].get_delta_weight("default")
        elif ".lora_" not in name:
            merged[f"{layer}.{weight}" if inner else name] = tensor
    return dict(gather_tensors(merged))


@dataclass(frozen=True, slots=True)
class Models:
    """The trainer, served model and tokenizer of a run."""

    trainer: TrainerGroup
    served: PreTrainedModel
    """The loaded model: a copy for an engine in this process, else the trained model itself."""
    tokenizer: Tokenizer
    eos_ids: frozenset[int]


@contextlib.contextmanager
def open_models(config: TrainConfig) -> Iterator[Models]:
    """Load the model on this rank and make its trainer; the other ranks end with rank 0."""
    with join_ranks(config.device) as device:
        model, tokenizer, eos_ids = load(config.model or Path(), dtype=torch.float32)
        model.to(device)  # type: ignore[arg-type]  # its stub is of a wrapper
        embeds = not config.engine.urls and rank_and_world()[0] == 0
        served = copy.deepcopy(model) if embeds else model
        fsdp = config.fsdp
        reference = prepare(copy.deepcopy(model), fsdp=fsdp) if config.grpo.kl else None
        policy = prepare(model, config.lora, config.schedule.seed, fsdp=fsdp)
        trainer = TrainerGroup(Grpo(policy, config.grpo, reference))
        try:
            yield Models(trainer, served, tokenizer, eos_ids)
        finally:
            trainer.close()


def prepare(
    model: torch.nn.Module, lora: Lora | None = None, seed: int = 0, *, fsdp: bool
) -> torch.nn.Module:
    """Add a new adapter, equal on every rank, and shard the model, each if configured."""
    model = model if lora is None else _adapt(model, lora, seed)
    if fsdp and dist.is_initialized():
        shard(model)
    return model


def _adapt(model: Any, lora: Lora, seed: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - an extra

    targets = list(lora.targets) or "all-linear"
    settings = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    # PEFT 0.21 uses a deprecated name of transformers
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return get_peft_model(model, settings)


# --------------------------------------------------------------------------- the engine
@dataclass(frozen=True, slots=True)
class Replicas:
    """The engine's connection, and the update function of each replica by URL."""

    connection: EngineConnection
    updaters: Mapping[str, Update]


@contextlib.asynccontextmanager
async def open_replicas(
    config: TrainConfig, models: Models, folder: Path
) -> AsyncIterator[Replicas]:
    """Connect to the engines at ``engine.urls``, or serve a copy of the model in this process.

    An adapter to publish alone is loaded from `folder` first, because calls use its name.
    """
    if config.engine.urls:
        slots = config.node.slots
        key = read_api_key(config.engine)
        async with contextlib.AsyncExitStack() as stack:
            connection = await stack.enter_async_context(open_engine(config.engine, slots=slots))
            remotes = [await make_updater(url, key) for url in connection.urls]
            for each in remotes:
                await stack.enter_async_context(each)
            if config.publishes_adapter:
                if other := [r.url for r in remotes if not isinstance(r, VllmWeightUpdater)]:
                    msg = f"lora.publish is 'adapter', but {other[0]} is not vLLM: set 'merged'"
                    raise UsageError(msg)
                await asyncio.to_thread(write_model, config, models, folder)
                for each in remotes:
                    await each.update(folder, 0, PauseMode.WAIT)
                template = connection.rendering and connection.rendering.name
                named = replace(config.engine, served_name=ADAPTER, renderer=template)
                connection = await stack.enter_async_context(open_engine(named, slots=slots))
            yield Replicas(connection, {each.url: each.update for each in remotes})
        return
    text = models.served.config.get_text_config()
    engine = Engine(
        models.served,
        eos_ids=models.eos_ids,
        max_model_len=config.window or int(text.max_position_embeddings),
        max_running=2 * config.node.slots,
        threads=1,
    )

    async def swap(_folder: Path, version: int, running: PauseMode) -> None:
        await engine.swap(await asyncio.to_thread(models.trainer.weights), version, running)

    rendering = make_rendering(config.engine, models.tokenizer, str(text.model_type))
    async with engine, serve_engine(engine, rendering) as connection:
        yield Replicas(connection, {connection.urls[0]: swap})


def write_model(config: TrainConfig, models: Models, folder: Path) -> None:
    """Write the weights to serve and their configuration in the Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    if config.publishes_adapter:
        models.trainer.write_adapter(folder)
        return
    write_weights(folder, models.trainer.weights(), models.served)


def write_weights(folder: Path, weights: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Write full weights, tied weights once, and the configuration of their model."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(weights.items())}
    unique = {name: weights[name] for name in first.values()}
    checkpoint.write_weights(folder / checkpoint.WEIGHTS, unique)
    model.config.save_pretrained(folder)


def write_model_folder(
    weights: dict[str, torch.Tensor], model: PreTrainedModel, source: Path, folder: Path
) -> None:
    """Write a complete model folder: `weights`, and the tokenizer and other files of `source`."""
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json", "optimizer.pt")
    shutil.copytree(source, draft, ignore=ignored)
    write_weights(draft, weights, model)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


# --------------------------------------------------------------------------- the server
class RemoteServer(Client):
    """Client of a remote server, with the methods of `LocalServer` for training."""

    async def run(self, tasks: Sequence[Task], on_done: OnDone) -> list[Trajectory]:
        """Return the results of all samples of `tasks`; finished samples are not run again."""
        await self.submit(tasks)
        names = [task.id for task in tasks]
        done = 0
        async with aclosing(self.released(names)) as released:
            async for view in released:
                done += view.samples
                on_done(done, sum(task.samples for task in tasks))
        return await self.load_results(names)

    async def run_again(self, tasks: Sequence[str]) -> frozenset[str]:
        """Queue the sessions that ended for a reason outside the policy again; return them."""
        again: set[str] = set()
        for task in tasks:
            again.update(await self.retry_task(task, by="trainer"))
        return frozenset(again)

    async def load_results(self, tasks: Sequence[str]) -> list[Trajectory]:
        """Return the trajectories of finished tasks, in the order of `tasks`."""
        trajectories = []
        for task in tasks:
            async for view in self.sessions(task=task):
                with contextlib.suppress(Missing):  # it was cancelled before it ran
                    trajectories.append(await self.trajectory(view.id))
        return trajectories


@contextlib.asynccontextmanager
async def open_server(
    config: TrainConfig, folder: Path, engine: EngineConnection
) -> AsyncIterator[LocalServer | RemoteServer]:
    """Connect to ``server``, or open a server with a node in `folder`."""
    if config.server is not None:
        async with RemoteServer(config.server, deadline_s=_SERVER_S) as remote:
            yield remote
        return
    settings = Settings(
        server=ServerSettings(lease_s=_LEASE_S),
        # The name is the same in every folder, so that a resumed run replaces its old node.
        node=replace(config.node, name="train"),
        gateway=config.gateway,
    )
    async with open_local(settings, folder, engine) as local:
        yield local


def make_publisher(
    config: TrainConfig, server: LocalServer | RemoteServer, replicas: Replicas
) -> Publisher:
    """Return the publisher of weights to the replicas and the server."""
    model = ADAPTER if config.publishes_adapter else None
    return Publisher(
        server if isinstance(server, RemoteServer) else server.control,
        replicas.updaters,
        mode=config.schedule.pause,
        within_s=config.schedule.publish_s,
        connect=partial(connect_scorer, model=model, key=read_api_key(config.engine)),
    )
