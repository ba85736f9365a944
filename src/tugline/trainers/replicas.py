"""The engine of a run: in this process with a copy of the model, or running vLLM or SGLang."""

import contextlib
import copy
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from transformers import PreTrainedModel

from tugline.chat.tokenizer import Tokenizer
from tugline.inference.engine import Engine
from tugline.launch.engine import EngineConnection, make_rendering, open_engine, serve_engine
from tugline.trainers.config import TrainConfig
from tugline.trainers.publish import (
    EmbeddedWeightUpdater,
    Running,
    WeightUpdater,
    make_updater,
)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The engine, and how each of its replicas gets new weights, by URL."""

    connection: EngineConnection
    updaters: Mapping[str, WeightUpdater]


@contextlib.asynccontextmanager
async def open_replicas(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Tokenizer, eos_ids: frozenset[int]
) -> AsyncIterator[Replicas]:
    """Connect to the engines at ``engine.urls``, or serve a copy of `model` in this process."""
    if config.engine.urls:
        async with (
            open_engine(config.engine, slots=config.node.slots) as connection,
            contextlib.AsyncExitStack() as stack,
        ):
            updaters: dict[str, WeightUpdater] = {
                url: await stack.enter_async_context(await make_updater(url))
                for url in connection.urls
            }
            yield Replicas(connection, updaters)
        return
    text = model.config.get_text_config()
    engine = Engine(
        copy.deepcopy(model),
        eos_ids=eos_ids,
        max_model_len=config.window or int(text.max_position_embeddings),
        max_running=2 * config.node.slots,
        threads=1,
    )

    async def swap(_folder: Path, version: int, running: Running) -> None:
        await engine.swap(model.state_dict(), version, running)

    rendering = make_rendering(config.engine, tokenizer, str(text.model_type))
    async with engine, serve_engine(engine, rendering) as connection:
        yield Replicas(connection, {connection.urls[0]: EmbeddedWeightUpdater(swap)})


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write weights and configuration as Hugging Face and the engines read them."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_model(model, str(folder / "model.safetensors"), {"format": "pt"})
    model.config.save_pretrained(folder)
